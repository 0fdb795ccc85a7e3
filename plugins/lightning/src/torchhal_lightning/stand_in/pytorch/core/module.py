"""LightningModule: torchhal's Module with the arguments, the attributes and the default bodies of Lightning's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

import torchhal
from torchhal.errors import ConfigurationError
from torchhal.trainer.adapters import run_of
from torchhal_lightning._logging import Log
from torchhal_lightning.stand_in.pytorch.core._initial import InitialHyperparameters


class LightningModule(InitialHyperparameters, torchhal.Module):
    """Base class of models that were written for Lightning."""

    __jit_unused_properties__: ClassVar[list[str]] = [
        *torchhal.Module.__jit_unused_properties__, "hparams_initial", "on_gpu"
    ]  # fmt: skip

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    example_input_array: Any = None
    """Input of ``forward`` for exports."""

    prepare_data_per_node = True

    strict_loading = True
    """Whether a checkpoint's weights must be all that the model has, and no others."""

    # -- logging ---------------------------------------------------------------------------------------------

    def log(  # type: ignore[override]
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Record one value; see :meth:`torchhal.Module.log`."""
        if "_trainer" not in self.__dict__:
            super().log(name, value)  # warns
            return
        Log(self, run_of(self.trainer))(
            name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist, sync_dist_group,
            add_dataloader_idx, batch_size, metric_attribute, rank_zero_only,
        )  # fmt: skip

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:  # type: ignore[override]
        """Call :meth:`log` for each item of ``dictionary``."""
        super().log_dict(dictionary, *args, **options)

    # -- optimization ----------------------------------------------------------------------------------------

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> torch.Tensor | None:
        """Clip as the arguments say, and where they say nothing as the Trainer's.

        Raises:
            ConfigurationError: both say how, and not the same.
        """
        algorithm: Any = gradient_clip_algorithm  # a word, or a member of an enum
        chosen: dict[str, Any] = {}
        for name, given in (("val", gradient_clip_val), ("algorithm", getattr(algorithm, "value", algorithm))):
            own = getattr(self.trainer, f"gradient_clip_{name}")
            if given is not None and own is not None and given != own:
                raise ConfigurationError(
                    f"{type(self).__name__}.clip_gradients(gradient_clip_{name}={given!r}) and "
                    f"Trainer(gradient_clip_{name}={own!r}) contradict each other: leave out one of them"
                )
            chosen[f"gradient_clip_{name}"] = own if given is None else given
        return super().clip_gradients(optimizer, **chosen)

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Let only this optimizer's parameters require gradients inside of the context."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self) -> None:
        """Let no parameter require gradients, in evaluation mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Let all parameters require gradients, in training mode."""
        self.requires_grad_(True)
        self.train()

    # -- steps and hooks -------------------------------------------------------------------------------------

    def predict_step(self, batch: Any, *args: Any) -> Any:
        """Return what ``forward`` returns."""
        return self(batch)

    def on_validation_model_zero_grad(self) -> None:
        """Clear gradients before a fit's validation, between two optimizer steps; their memory is free meanwhile."""
        self.zero_grad()

    # -- the rest --------------------------------------------------------------------------------------------

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @torch.no_grad()
    def to_onnx(self, file_path: Any, input_sample: Any = None, **options: Any) -> Any:
        """Export ``forward`` by ``torch.onnx.export``, for ``input_sample`` or ``example_input_array``."""
        sample = self._sample(input_sample)
        training = self.training
        self.eval()
        try:
            return torch.onnx.export(self, sample, file_path, **options)
        finally:
            self.train(training)

    @torch.no_grad()
    def to_torchscript(
        self, file_path: Any = None, method: str = "script", example_inputs: Any = None, **options: Any
    ) -> Any:
        """Return the model as TorchScript, and save it where ``file_path`` is given.

        Args:
            file_path: of the file.
            method: "script" or "trace".
            example_inputs: to trace; else ``example_input_array``.
            options: of ``torch.jit``'s function.
        """
        if method not in ("script", "trace"):
            raise ValueError(f"'method' must be 'script' or 'trace' (got {method!r})")
        training = self.training
        self.eval()
        try:
            if method == "script":
                script = torch.jit.script(self, **options)
            else:
                script = torch.jit.trace(  # type: ignore[no-untyped-call]
                    func=self, example_inputs=self._sample(example_inputs), **options
                )
        finally:
            self.train(training)
        if file_path is not None:
            torch.jit.save(script, file_path)
        return script

    def _sample(self, given: Any) -> Any:
        sample = self.example_input_array if given is None else given
        if sample is None:
            raise ValueError(f"set {type(self).__name__}.example_input_array, or pass an input to export with")
        return sample if isinstance(sample, tuple) else (sample,)
