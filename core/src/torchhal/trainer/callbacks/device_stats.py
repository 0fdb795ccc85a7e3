"""Log what the sensors of the device and of the host read while training, with DeviceStats."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from torchhal._arguments import check_optional_bool
from torchhal.errors import ConfigurationError
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class DeviceStats(Callback):
    """Callback that sends the readings of rank 0's device to the loggers, every ``log_every_n_steps`` steps.

    They are those of :meth:`.Accelerator.device_stats` (utilization, temperature, power), and of
    :meth:`.Accelerator.memory_stats` as ``memory_allocated_bytes`` and the like, before a batch and after one:
    ``DeviceStats.on_train_batch_start/utilization_percent``. Those of the host are ``cpu_percent``, ``cpu_vm_percent``
    (memory) and ``cpu_swap_percent``, by ``psutil``.

    Args:
        cpu_stats: read the host too; None: only where training runs on the CPU.

    Raises:
        ConfigurationError: in ``setup``, for a Trainer without loggers, and where ``psutil`` is needed and missing.

    .. versionadded:: 0.2
    """

    @explain_unknown_arguments
    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = check_optional_bool("cpu_stats", cpu_stats)
        self._reads_host = False
        self._step_seen = 0
        self._started = False

    def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
        if stage != "fit":
            return
        name = type(self).__name__
        if not trainer.loggers and not trainer.fast_dev_run:  # which has none
            raise ConfigurationError(
                f"{name} needs a logger to send the readings to, and the Trainer has none: pass logger=True or a "
                "logger, or leave the callback out"
            )
        on_cpu = trainer.strategy.root_device.type == "cpu"
        self._reads_host = on_cpu if self._cpu_stats is None else self._cpu_stats
        if self._reads_host and importlib.util.find_spec("psutil") is None:
            raise ConfigurationError(
                f"{name} needs psutil to read the host: pip install psutil, or pass cpu_stats=False"
            )

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._step_seen = trainer.global_step
        self._started = False

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        every, step = trainer.log_every_n_steps, trainer.global_step
        if every and step % every == 0 and not self._started:  # several batches may make one step
            self._started = True
            self._log(trainer, "on_train_batch_start")

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every, step, before = trainer.log_every_n_steps, trainer.global_step, self._step_seen
        if step != before:
            self._step_seen = step
            self._started = False
            if every and step // every != before // every:
                self._log(trainer, "on_train_batch_end")

    def _log(self, trainer: Trainer, hook: str) -> None:
        if not trainer.is_global_zero:
            return
        device = trainer.strategy.root_device
        readings: dict[str, float] = dict(trainer.accelerator.device_stats(device))
        readings |= {f"memory_{name}_bytes": count for name, count in trainer.accelerator.memory_stats(device).items()}
        if self._reads_host:
            readings |= read_host()
        if not readings:
            trainer.warn_once(f"{type(self).__name__} logs nothing: no sensor of {device} can be read here")
            return
        for logger in trainer.loggers:
            prefix = f"{type(self).__name__}.{hook}{getattr(logger, 'group_separator', '/')}"
            named = {prefix + name: value for name, value in readings.items()}
            trainer.call_logger(logger, "log_metrics", named, trainer.global_step)


def read_host() -> dict[str, float]:
    """Return the use of the host's processors, memory and swap in percent: of processors since the last call."""
    psutil = importlib.import_module("psutil")
    return {
        "cpu_percent": psutil.cpu_percent(),
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
