"""Share what every strategy on XLA devices does: end each graph in one known place, and read nothing in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torchhal.errors import ConfigurationError
from torchhal.precision import MixedPrecision
from torchhal.strategies import StepResult, Strategy


class LazyStrategy(Strategy):
    """The base class of strategies on XLA devices.

    Operators are recorded, and run when the accelerator's ``step_marker()`` cuts the graph. There is one cut per batch:
    after the optimizer's step, after the backward of a batch that only accumulates, after a step without training. What
    is logged is part of that graph; a logger that reads it later reads a result, and nothing runs for it.

    Args:
        prefetch: how many batches of a DataLoader torch_xla's loader threads move to the device ahead of time. 0: each
            is moved when it is needed, while the device may still be busy with the one before. With a prefetch and no
            workers, random numbers that the dataset draws in this process come early, and a resumed run draws others.
        options: as in :class:`torchhal.strategies.Strategy`.

    Under ``16-mixed`` there are two cuts per step: whether gradients overflowed is read on the host, before the update.
    """

    accelerators: ClassVar[frozenset[str] | None] = frozenset({"tpu", "xla"})
    inference_mode: ClassVar[bool] = False  # torch_xla: "Cannot set version_counter for inference tensor"

    def __init__(self, *, prefetch: int = 0, **options: Any) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ConfigurationError(f"'prefetch' must be an int of at least 0 (got {prefetch!r})")
        super().__init__(**options)
        self.prefetch = prefetch

    def setup_environment(self) -> None:
        if not self._environment_ready:
            self.check_process()
        super().setup_environment()

    def check_process(self) -> None:
        """Refuse a process in which torch_xla is in another mode; no runtime is started."""
        from torch_xla import runtime

        if runtime.is_spmd():
            raise ConfigurationError(
                f"strategy {self.display_name!r} can't run in a process in which SPMD is switched on "
                "(by an earlier 'xla_spmd' or 'xla_fsdp', or by XLA_USE_SPMD), which torch_xla can't undo: start a "
                "process of its own"
            )
        if (threads := torch_xla_threads()) > 1:
            raise ConfigurationError(
                f"torch_xla.launch started {threads} replicas as threads of this process, and a process trains one: "
                "use strategy='xla_spmd' without torch_xla.launch"
            )

    def process_dataloader(self, loader: Any, *, training: bool) -> Any:
        if not self.prefetch or not isinstance(loader, DataLoader):
            return loader
        from torchhal_xla._device_loader import DeviceLoader

        return DeviceLoader(loader, self.root_device, self.prefetch)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run a backward without a cut: an update that follows belongs to the same graph."""
        self.precision.backward(loss, *args, **kwargs)

    def no_backward_sync(self) -> AbstractContextManager[Any] | None:
        """Return a context that cuts after each batch of an accumulation.

        Their graphs would else run as one that grows with their number.
        """
        assert self.mark_step is not None
        return _CutAfter(self.mark_step)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        cut = self.mark_step
        assert cut is not None
        if closure is None and isinstance(self.precision, MixedPrecision) and self.precision.scaler is not None:
            self.unscale_gradients(optimizer)
            cut()  # or reading whether they overflowed would run the backward, and the update run it again
        evaluate = closure
        if evaluate is not None:

            def closure() -> Any:
                loss = evaluate()
                cut()  # the optimizer reads the loss, and would run the forward once more for it
                return loss

        return super().optimizer_step(optimizer, closure)  # which cuts

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Write host copies: an IO that knows nothing of XLA would write no values of its tensors, or fail."""
        from torchhal_xla.checkpoint import to_host

        writes = self.is_global_zero or "sharded" in self.checkpoint_io.features
        super().save_checkpoint(to_host(checkpoint) if writes else checkpoint, path, storage_options=storage_options)


class _CutAfter:
    """A context whose end cuts the graph, and which may be entered many times."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self.cut = cut

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self.cut()


def torch_xla_threads() -> int:
    """Return how many replicas torch_xla runs as threads of this process; 0 outside of its launch."""
    import torch_xla

    local = int(torch_xla._XLAC._xla_get_replication_devices_count())
    return local if local > 1 and threading.current_thread() is not threading.main_thread() else 0
