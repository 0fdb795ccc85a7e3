"""Define every hook of a model, with an empty body."""

from __future__ import annotations

from typing import Any

import torch

from torchhal._overrides import declares_hooks


@declares_hooks
class ModuleHooks:
    """The hooks of a model, each with an empty body; the Trainer calls those that a model overrides."""

    def prepare_data(self) -> None:
        """Download and unpack, on local rank 0 of each node, before anything else."""

    def setup(self, stage: str) -> None:
        """Set up on every rank, before the model is moved; ``stage`` is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Clean up on every rank, at the very end."""

    def configure_model(self) -> None:
        """Build large layers on every rank, under the strategy's ``init_context``."""

    def configure_callbacks(self) -> Any:
        """Return callbacks of the model's own; they replace those of the same type."""
        return []

    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Run before each training batch; returning -1 ends the epoch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()  # type: ignore[attr-defined]

    def on_validation_model_train(self) -> None:
        """Put the model back; the default restores each submodule's mode."""

    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()  # type: ignore[attr-defined]

    def on_test_model_train(self) -> None:
        """Put the model back; the default restores each submodule's mode."""

    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_model_eval(self) -> None:
        """Put the model into evaluation mode."""
        self.eval()  # type: ignore[attr-defined]

    def on_predict_model_train(self) -> None:
        """Put the model back; the default restores each submodule's mode."""

    def on_before_zero_grad(self, optimizer: Any) -> None: ...
    def on_before_backward(self, loss: torch.Tensor) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch of a type that only the model supports."""
        from torchhal.pytree import move_to_device

        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch on the device."""
        return batch

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of the (scaled) loss."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Make one step; forward and backward run inside ``optimizer_closure``."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Clear the gradients before the first backward of a step."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler; ``metric`` is the monitored value, None without one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip; override for another way, called before each optimizer step."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain data to what is saved."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read it back, before the weights are loaded."""
