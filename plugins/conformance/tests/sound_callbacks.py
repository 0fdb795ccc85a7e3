"""A sound callback that comes near to what the checks of callbacks forbid."""

from __future__ import annotations

import signal
import time
from typing import Any

import torch

from torchhal.trainer.callbacks import Callback


class Careful(Callback):
    """Measures times, looks at the model and at some batches, and handles a signal, as the contract allows."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.tenths = 0.0
        self.at = 0
        self.first_step: int | None = None
        self.losses: list[float] = []
        self._outputs: list[torch.Tensor] = []
        self._handles: list[Any] = []
        self._generator = torch.Generator().manual_seed(3)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handles": [], "_generator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _generator=torch.Generator().manual_seed(3))

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        torch.manual_seed(1)
        self._outputs.clear()
        self._handles.append(module.register_forward_hook(lambda *given: self._outputs.append(given[-1].detach())))
        if stage == "fit":
            self._handler = signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if stage == "fit":
            signal.signal(signal.SIGUSR2, self._handler)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.first_step = trainer.global_step
        self._began = time.monotonic() - self.seconds

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        modes = [one.training for one in module.modules()]
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(0)
            module.eval()(torch.rand(2, 1))
        for one, training in zip(module.modules(), modes, strict=True):
            one.training = training

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if torch.rand((), generator=self._generator) < 0.5:
            self._looked_at = batch[0].clone().mul_(0.5)

    def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
        self._loss = loss.detach()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        self.losses.append(float(self._loss))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seconds, self.at = time.monotonic() - self._began, time.time_ns()
        self.tenths = round(self.seconds, 1)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["careful"] = {"steps": self.steps, "saved_at": time.time()}

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.steps = checkpoint.get("careful", {"steps": 0})["steps"]

    def state_dict(self) -> dict[str, Any]:
        times = {"seconds": self.seconds, "tenths": self.tenths, "at": self.at}
        return {"steps": self.steps, "losses": list(self.losses), **times}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict, losses=list(state_dict["losses"]))
