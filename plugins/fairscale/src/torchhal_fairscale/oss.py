"""Train data parallel with optimizers that fairscale's OSS divides: gradients averaged by DistributedDataParallel."""

from __future__ import annotations

from torchhal.strategies import DDPStrategy
from torchhal_fairscale._oss_base import OSSBase


class FairscaleOSSStrategy(OSSBase, DDPStrategy):
    """``fairscale.optim.OSS`` beside torch's ``DistributedDataParallel``: ZeRO stage 1.

    Every rank has the model and all averaged gradients; it steps the parameters that OSS gives it, has their optimizer
    state alone, and receives the others' updated parameters. The user's optimizers stay the objects that they are.

    Args:
        activation_checkpointing: a class of layers, or several, whose activations fairscale's ``checkpoint_wrapper``
            computes again in backward.
        options: those of :class:`.DDPStrategy`: ``find_unused_parameters``, ``bucket_cap_mb``, ``timeout``, ...

    Raises:
        ConfigurationError: fairscale is missing or doesn't fit; an optimizer looks at all parameters together, or its
            step needs a closure, as LBFGS's does.
    """
