"""Train data parallel with Horovod: a replica per process, gradients averaged by Horovod's allreduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchhal.distributed.stores import Store
from torchhal.errors import ConfigurationError
from torchhal.plugin import Availability
from torchhal.strategies.gradient_averaging import GradientAveragingStrategy
from torchhal_horovod import _sdk as sdk
from torchhal_horovod._gradients import GradientAverager
from torchhal_horovod._session import Session

_COMPRESSIONS = (None, "fp16")


class HorovodStrategy(GradientAveragingStrategy):
    """One process per device; Horovod averages gradients, torch's process group does everything else.

    The processes may be started by ``horovodrun``, torchrun, MPI, Slurm, or by torchhal itself: rank 0 serves the
    rendezvous of Horovod's gloo. What Horovod doesn't add up travels in another form: bfloat16 as float32, complex
    numbers as pairs, tensors of a device that it wasn't built for through host memory, sparse gradients in torch's
    process group. Rank 0's buffers are broadcast before a training step, as under ``ddp``.

    Args:
        compression: ``"fp16"`` sends float32 gradients as float16, which halves the traffic and rounds them; None
            sends them as they are.
        find_unused_parameters: allow parameters that a step does not use, at the cost of one more message per step.
            One that no rank uses keeps no gradient.
        options: ``start_method``, ``process_group_backend``, ``timeout`` and the parts, as in
            :class:`.ParallelStrategy`.

    Raises:
        ConfigurationError: Horovod is missing or doesn't fit this torch; a value that can't be.
    """

    @classmethod
    def availability(cls) -> Availability:
        return sdk.HOROVOD.availability()

    def __init__(self, *, compression: str | None = None, **options: Any) -> None:
        if compression not in _COMPRESSIONS:
            raise ConfigurationError(f"'compression' must be None or 'fp16' (got {compression!r})")
        super().__init__(**options)
        sdk.HOROVOD.check()
        self.compression = compression
        self._session = Session()
        self._hvd: Any = None
        self._averager: GradientAverager | None = None

    @property
    def features(self) -> frozenset[str]:  # type: ignore[override]
        """The feature ``lossy`` where gradients are rounded."""
        return frozenset({"lossy"}) if self.compression else frozenset()

    @property
    def tolerances(self) -> Mapping[str, float]:  # type: ignore[override]
        """The greatest differences from training in one process."""
        return {"weights": 2e-3, "losses": 5e-3, "gradient_norm": 5e-3} if self.compression else {}

    # -- life cycle ------------------------------------------------------------------------------------------

    def setup_communication(self) -> Store | None:
        store = super().setup_communication()
        with self.guard("set-up of Horovod"):
            self._hvd = self._session.begin(self.environment, self.timeout.total_seconds())
        return store

    def setup_optimizers(self, optimizers: Sequence[Optimizer], lr_scheduler_configs: Sequence[Any] = ()) -> None:
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        assert self.module is not None
        if self.world_size > 1:
            self._averager = GradientAverager(
                self._hvd,
                self.module,
                ignored=self.parameters_to_ignore(),
                is_paused=lambda: self.averaging_is_paused,
                devices=sdk.device_types(self._hvd),
                compressed=self.compression == "fp16",
                finds_unused=self.find_unused_parameters,
                timeout=self.timeout.total_seconds(),
                guard=self.guard,
                explain_unused=self.explain_unused,
            )

    def restore_module(self) -> None:
        super().restore_module()
        self._release()

    def teardown(self) -> None:
        try:
            self._release()
            self._session.end()
        finally:
            self._hvd = None
            super().teardown()

    def _release(self) -> None:
        averager, self._averager = self._averager, None
        if averager is not None:
            averager.remove()

    # -- steps -----------------------------------------------------------------------------------------------

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self._averager is not None:
            self._averager.watch()  # parameters may have been replaced, frozen or unfrozen

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self._averager is not None and not self.averaging_is_paused:
            with self.guard("averaging of the gradients"):
                self._averager.finish()

    def sync_gradients(self) -> None:
        if self._averager is None:
            super().sync_gradients()
            return
        with self.guard("averaging of the gradients"):
            self._averager.finish(frozen=True)
        self.gradients_synced = True
