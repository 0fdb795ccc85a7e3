"""Print the submodules and parameter counts of the model, with ModelSummary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from torchhal._arguments import check_count
from torchhal._text_table import format_table
from torchhal.memory_estimate import format_bytes
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class ModelSummary(Callback):
    """Callback that prints the model's submodules and their parameter counts on rank 0 when fit begins.

    Args:
        max_depth: how deep to list: 1 for the model's children, 2 for theirs too, -1 for all, 0 for no table.
    """

    @explain_unknown_arguments
    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = check_count("max_depth", max_depth, minimum=0, unlimited=True)

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        if self.max_depth and trainer.is_global_zero:
            trainer.print(summarize(module, self.max_depth))


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """Return a table of name, class and parameter count of each submodule, then the trainable and frozen totals."""
    rows = [("name", "type", "parameters")]
    for path, child in module.named_modules():
        if path and (max_depth == -1 or path.count(".") < max_depth):
            rows.append((path, type(child).__name__, _count(child)))
    own = [parameter for _, parameter in module.named_parameters(recurse=False)]
    if own and len(rows) > 1:
        rows.append(("(own)", "Parameter", _grouped(sum(map(_numel, own)))))
    trainable = frozen = size = 0
    lazy = False
    for parameter in module.parameters():
        count = _numel(parameter)
        lazy = lazy or nn.parameter.is_lazy(parameter)
        size += count * parameter.dtype.itemsize
        if parameter.requires_grad:
            trainable += count
        else:
            frozen += count
    lines = []
    if len(rows) > 1:
        lines = format_table(rows, align="<<>")
        lines.insert(1, "-" * max(map(len, lines)))
    total = f"{_grouped(trainable)} trainable parameters, {_grouped(frozen)} frozen, {format_bytes(size)}"
    lines.append(total + (" (without those that the first batch will shape)" if lazy else ""))
    return "\n".join(lines)


def _count(module: nn.Module) -> str:
    parameters = list(module.parameters())
    if any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        return "?"
    return _grouped(sum(map(_numel, parameters)))


def _numel(parameter: nn.Parameter) -> int:
    return 0 if nn.parameter.is_lazy(parameter) else parameter.numel()


def _grouped(count: int) -> str:
    return f"{count:,}"
