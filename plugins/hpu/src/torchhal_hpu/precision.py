"""Compute in bfloat16 with op lists of one's own, and in float8 through Intel's transformer engine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchhal.accelerators import Accelerator
from torchhal.errors import ConfigurationError, UnsupportedCombinationError
from torchhal.precision import MixedPrecision
from torchhal_hpu import _sdk as sdk
from torchhal_hpu.accelerator import AUTOCAST_LISTS, TRANSFORMER_ENGINE

LISTS = {
    "lower_precision_ops": "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST",
    "fp32_ops": "PT_HPU_AUTOCAST_FP32_OPS_LIST",
}
_OPERATOR = re.compile(r"[A-Za-z_]\w*")


class HPUMixedPrecision(MixedPrecision):
    """``bf16-mixed`` with a choice of the operators that run in each width.

    Args:
        lower_precision_ops: a file with names of operators that run in bfloat16, one per line; None for Intel's list.
        fp32_ops: the same for those that run in float32.

    A list replaces Intel's own, it adds nothing to it. The bridge reads the files when it is imported, and a Trainer
    imports it: make this object first. It names the files in the environment, for this process and those it starts.

    Raises:
        ConfigurationError: no such file, or a line in it is no name; or the bridge has been imported without it.
    """

    def __init__(
        self,
        lower_precision_ops: str | os.PathLike[str] | None = None,
        fp32_ops: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__("bfloat16")
        self.needs = self.needs | {AUTOCAST_LISTS}
        lists = {"lower_precision_ops": lower_precision_ops, "fp32_ops": fp32_ops}
        self._files = {
            LISTS[argument]: _checked(argument, file) for argument, file in lists.items() if file is not None
        }
        for variable, path in self._files.items():
            if sdk.is_imported() and os.environ.get(variable) != path:
                raise ConfigurationError(
                    f"{path} comes too late: habana_frameworks.torch, which reads the lists when it is imported, has "
                    f"been. Make HPUMixedPrecision before the first Trainer, or set {variable} for the process"
                )
        os.environ.update(self._files)


def _checked(argument: str, file: str | os.PathLike[str]) -> str:
    path = Path(file).absolute()
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"'{argument}' must be a file with names of operators (got {file!r}: {error})"
        ) from None
    names = [line.strip() for line in lines if line.strip()]
    wrong = [name for name in names if not _OPERATOR.fullmatch(name)]
    if wrong or not names:
        what = f"the line {wrong[0]!r}" if wrong else "nothing"
        raise ConfigurationError(
            f"'{argument}' must be a file with one operator's name per line, such as 'matmul' ({path} holds {what})"
        )
    return str(path)


class FP8Precision(MixedPrecision):
    """Linear layers in float8 through Intel's transformer engine, everything else as in ``bf16-mixed``.

    As any precision that converts a module, it leaves it converted: after a run its layers are the engine's still.

    Args:
        recipe: a ``recipe.DelayedScaling`` of the engine; None for its default.
        replace_layers: put the engine's ``Linear`` in the place of every ``nn.Linear``, with the same parameters under
            the same names. False for a model that is built of the engine's layers already.
    """

    alias = "hpu-fp8"

    def __init__(self, recipe: Any = None, replace_layers: bool = True) -> None:
        super().__init__("bfloat16")
        self.alias = "hpu-fp8"
        self.needs = self.needs | {TRANSFORMER_ENGINE}
        self.recipe = recipe
        self.replace_layers = replace_layers

    def setup(self, accelerator: Accelerator, device: torch.device) -> None:
        """Load the transformer engine.

        Raises:
            UnsupportedCombinationError: the device is a first Gaudi, or the transformer engine is not installed.
        """
        super().setup(accelerator, device)
        import habana_frameworks.torch.hpu as hpu

        if (name := hpu.get_device_name()) == "GAUDI":
            raise UnsupportedCombinationError(
                f"precision 'fp8' needs a Gaudi 2 or later (this is a {name}): use 'bf16-mixed'"
            )
        try:
            import habana_frameworks.torch.hpex.experimental.transformer_engine as te
        except ImportError as error:
            raise UnsupportedCombinationError(
                f"precision 'fp8' needs Intel's transformer engine, which comes with the Gaudi software as the package "
                f"intel-transformer-engine ({error}): install it, or use 'bf16-mixed'"
            ) from error
        self._autocast, self._linear = te.fp8_autocast, te.Linear

    def convert_module(self, module: nn.Module) -> nn.Module:
        module = super().convert_module(module)
        if not self.replace_layers:
            return module
        replaced: dict[nn.Module, nn.Module] = {}  # a layer that stands in two places stays one
        for owner in list(module.modules()):
            for name, child in owner._modules.items():  # named_children tells a shared layer once
                if type(child) is nn.Linear:
                    if child not in replaced:
                        replaced[child] = self._replacement(child)
                    setattr(owner, name, replaced[child])
        return module

    def _replacement(self, layer: nn.Linear) -> nn.Module:
        new: nn.Module = self._linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        new.weight = layer.weight
        if layer.bias is not None:
            new.bias = layer.bias
        return new.train(layer.training)

    def forward_context(self) -> AbstractContextManager[Any]:
        return _Nested(super().forward_context, partial(self._autocast, enabled=True, fp8_recipe=self.recipe))


class _Nested:
    """A context that makes its contexts anew each time it is entered, also while it is entered."""

    def __init__(self, *make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for make in self._make:
                stack.enter_context(make())
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
