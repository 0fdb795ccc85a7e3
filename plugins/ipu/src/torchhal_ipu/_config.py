"""Combine poptorch's options for a run from the Trainer's flags and the user's own options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchhal.errors import ConfigurationError, UnsupportedCombinationError


@dataclass(frozen=True)
class Sizes:
    """The numbers of micro-batches that one call takes."""

    iterations: int
    """Optimizer steps of one call, or batches without training."""
    accumulation: int
    replicas: int
    group: int = 1
    """Replicas that get the same input."""

    @property
    def parts(self) -> int:
        return self.iterations * self.accumulation * (self.replicas // self.group)

    def __str__(self) -> str:
        return (
            f"deviceIterations({self.iterations}) * gradientAccumulation({self.accumulation}) * "
            f"replicationFactor({self.replicas}){f' / {self.group} per group' if self.group > 1 else ''}"
        )


def sizes(options: Any) -> Sizes:
    return Sizes(
        iterations=options.device_iterations,
        accumulation=options.Training.gradient_accumulation,
        replicas=options.replication_factor,
        group=options.input_group_size,
    )


def check_type(name: str, value: Any) -> None:
    """Raise TypeError for what isn't poptorch's Options."""
    import poptorch

    if value is not None and not isinstance(value, poptorch.Options):
        raise TypeError(f"{name!r} must be poptorch.Options (got {value!r})")


@dataclass(frozen=True)
class Flags:
    """The options that the Trainer and the strategy's arguments request."""

    replicas: int
    devices: int
    accumulation: int
    iterations: int | None
    cache_dir: str | None
    profile_dir: str | None
    automatic_loss_scaling: bool


def for_training(given: Any, flags: Flags) -> Any:
    """Return new options for training.

    Raises:
        ConfigurationError: flags and ``given`` contradict each other, or ask for what can't be.
    """
    import poptorch

    options = _start(given, flags, "training_options")
    accumulation = _one(
        "gradient accumulation", options.Training.gradient_accumulation, "training_options",
        flags.accumulation if flags.accumulation != 1 else None, f"accumulate_grad_batches={flags.accumulation}",
    )  # fmt: skip
    if accumulation is not None:
        options.Training.gradientAccumulation(accumulation)
    iterations = _one(
        "device iterations", options.device_iterations, "training_options",
        flags.iterations, f"device_iterations={flags.iterations}",
    )  # fmt: skip
    if iterations is not None:
        options.deviceIterations(iterations)
    if flags.automatic_loss_scaling:
        options.Training.setAutomaticLossScaling(True)
    if options.output_mode == poptorch.OutputMode.Sum:
        raise ConfigurationError(
            "'training_options' ask for OutputMode.Sum, which adds up what a training step returns: use All, or Final"
        )
    if options.defaultOutputMode():
        options.outputMode(poptorch.OutputMode.All)  # the loss is that of the whole batch
    return options


def for_inference(given: Any, flags: Flags, *, whole: bool = True) -> Any:
    """Return new options for steps without training; not ``whole``: for one batch, as it comes, on one replica.

    One batch doesn't fill a pipeline of several IPUs, so its layers run one after the other there.

    Raises:
        ConfigurationError: as :func:`for_training`.
    """
    import poptorch

    options = _start(given, flags, "inference_options")
    if options.Training.gradient_accumulation != 1:
        raise ConfigurationError(
            "'inference_options' must leave gradientAccumulation at 1, as there are no gradients (got "
            f"{options.Training.gradient_accumulation}): use deviceIterations for more batches in one call"
        )
    if not options.defaultOutputMode() and options.output_mode != poptorch.OutputMode.All:
        raise ConfigurationError(
            "'inference_options' must have OutputMode.All, or none: metrics and predictions are of every batch (got "
            f"{poptorch.OutputMode(options.output_mode)!r})"
        )
    options.outputMode(poptorch.OutputMode.All)
    if not whole:
        options.inputReplicaGrouping(1, poptorch.CommGroupType.Consecutive)
        options.replicationFactor(1)
        options.deviceIterations(1)
        if flags.devices > flags.replicas:
            options.setExecutionStrategy(poptorch.ShardedExecution())
    return options


def _start(given: Any, flags: Flags, where: str) -> Any:
    import poptorch

    options = poptorch.Options() if given is None else given.clone()
    if options.Distributed.numProcesses > 1:
        raise UnsupportedCombinationError(
            f"ipu_strategy drives all IPUs from one process, and poptorch is told of {options.Distributed.numProcesses}"
            " (Options.Distributed, or mpirun's OMPI_COMM_WORLD_SIZE): start the script once, or call "
            "Options.Distributed.disable()"
        )
    if options.connection_type == poptorch.ConnectionType.Never:
        raise ConfigurationError(
            f"{where!r} ask for ConnectionType.Never, with which nothing can run: use Always, or OnDemand"
        )
    replicas = _one(
        "replicas", options.replication_factor, where, flags.replicas, f"devices={flags.devices}"
    )  # fmt: skip
    if replicas is not None:
        options.replicationFactor(replicas)
    if flags.devices & (flags.devices - 1) and not options.auto_round_num_ipus:
        raise ConfigurationError(
            f"'devices' must be a power of two, as IPUs are given out so (got {flags.devices}): use another number, or "
            f"pass {where} with autoRoundNumIPUs(True), which reserves more"
        )
    if flags.cache_dir is not None:
        options.enableExecutableCaching(flags.cache_dir)
    if flags.profile_dir is not None:
        options.enableProfiling(flags.profile_dir)
    if not options.exists("random_seed"):
        state = torch.get_rng_state()  # randomSeed seeds torch, too
        options.randomSeed(torch.initial_seed() % 2**31)
        torch.set_rng_state(state)
    return options


def _one(what: str, own: int, where: str, flag: int | None, flag_says: str) -> int | None:
    """Return the value that a flag brings; None where the options have it.

    1, poptorch's default, counts as none.
    """
    if flag is None or own == flag:
        return None
    if own != 1:
        raise ConfigurationError(
            f"{what} are given twice: {own} in {where!r}, and {flag} by {flag_says}; leave one of them out"
        )
    return flag
