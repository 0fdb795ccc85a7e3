"""What an error can suggest: the name that was meant, the distribution to install.

The table is the one place in core that knows the names of vendors. It is data for a message; nothing is decided
by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

_ALIASES: Final[Mapping[str, str]] = {
    "torchhal-gpu": "gpu cuda mps xpu",
    "torchhal-xla": "tpu xla single_xla single_tpu tpu_spawn xla_spmd xla_fsdp",
    "torchhal-hpu": "hpu hpu_single hpu_parallel",
    "torchhal-ipu": "ipu ipu_strategy",
    "torchhal-deepspeed": (
        "deepspeed deepspeed_stage_1 deepspeed_stage_2 deepspeed_stage_2_offload deepspeed_stage_3 "
        "deepspeed_stage_3_offload deepspeed_stage_3_offload_nvme"
    ),
    "torchhal-bagua": "bagua",
    "torchhal-hivemind": "hivemind collaborative",
    "torchhal-torchft": "torchft",
    "torchhal-ray": "ray",
    "torchhal-simulator": "sim",
    "torchhal-parallel": (
        "dp ddp2 zero1 zero2 zero3 fsdp ddp_sharded ddp_sharded_spawn ddp_fully_sharded tensor_parallel pipeline "
        "hybrid dcp async dcp_async"
    ),
    "torchhal-horovod": "horovod",
}

DISTRIBUTIONS: Final[Mapping[str, str]] = {
    alias: distribution for distribution, aliases in _ALIASES.items() for alias in aliases.split()
}
"""Alias -> the distribution to ``pip install``."""

CHECKPOINT_FILES: Final[Mapping[str, str]] = {
    ".metadata": "torchhal-parallel",
    "*.distcp": "torchhal-parallel",
    "zero_to_fp32.py": "torchhal-deepspeed",
}
"""A file in the folder that is a checkpoint, as a pattern -> the distribution that reads it."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one among ``known`` that is close enough to ``name`` to have been meant."""
    from difflib import get_close_matches  # only ever needed on the way to an error

    return next(iter(get_close_matches(name, sorted(known), n=1, cutoff=0.65)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence, ``"; did you mean 'x'?"``, or an empty string."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""
