"""Print the layers of the model with their parameters, and what each rank will hold of it, with ModelSummary."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchhal._arguments import check_count
from torchhal._text_table import format_table
from torchhal.accelerators.cpu import CPUAccelerator
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks import _meta_copy as meta
from torchhal.trainer.callbacks._model_description import (
    COLUMNS,
    NUMBERS,
    ModelDescription,
    RankMemory,
    Shapes,
    describe_model,
    find_shapes,
    first_line,
)
from torchhal.trainer.callbacks._terminal_lines import is_terminal
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from torchhal import Trainer


class ModelSummary(Callback):
    """Callback that prints on rank 0, when fit begins, the model's layers and how much memory a rank will need.

    A row has a layer's name, class, number of parameters, their bytes, and whether they are trained. If the model has
    an ``example_input_array`` (a tensor, a tuple of arguments, or a dict of keywords) its forward is called once on
    rank 0, by a copy on the meta device that computes nothing, and the rows have the shapes that layers take and
    return. The memory is the strategy's estimate for weights, gradients and the state of the optimizer.

    Args:
        max_depth: how deep to list: 1 for the model's children, 2 for theirs too, -1 for all, 0 for no table.
    """

    replaces = "model_summary"

    @explain_unknown_arguments
    def __init__(self, max_depth: int = 1) -> None:
        self.max_depth = check_count("max_depth", max_depth, minimum=0, unlimited=True)
        self._forget()

    def _forget(self) -> None:
        self._shapes = Shapes({})
        self._on_meta: nn.Module | None = None
        """The whole model, of which the strategy may leave a part in this process."""
        self._optimizers: Sequence[Optimizer] | None = None
        """Those that ``configure_optimizers`` returned, for ``_on_meta``; None without a call of it."""
        self._no_estimate = ""

    def _look_at_model(self, trainer: Trainer, module: Any) -> None:
        self._forget()
        if not self.max_depth:
            return
        strategy = trainer.strategy
        if trainer.is_global_zero:
            self._shapes = find_shapes(
                module, self.max_depth, strategy.accelerator, strategy.root_device, whole_shape=strategy.parameter_shape
            )
        with self._no_estimate_on_error():
            self._on_meta = meta.copy_to_meta(module, strategy.parameter_shape)

    def _look_at_optimizers(self, trainer: Trainer, module: Any, optimizers: Sequence[Optimizer]) -> None:
        if self._on_meta is None:
            return
        with self._no_estimate_on_error():
            meta.update_copy(self._on_meta, module)
            self._optimizers = meta.copy_optimizers(self._on_meta, module, optimizers)

    @contextlib.contextmanager
    def _no_estimate_on_error(self) -> Iterator[None]:
        """Keep the reason of what fails inside first: no model is refused because its memory can't be estimated."""
        try:
            yield
        except Exception as error:
            self._no_estimate = self._no_estimate or first_line(error)

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        if self.max_depth and trainer.is_global_zero:
            self._show(trainer, self._describe(trainer, module))
        self._forget()

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._forget()  # of a fit that didn't start

    def _describe(self, trainer: Trainer, module: Any) -> ModelDescription:
        strategy, whole = trainer.strategy, module if self._on_meta is None else self._on_meta
        estimate = None
        with self._no_estimate_on_error():
            if any(map(is_lazy, whole.parameters())):
                self._no_estimate = "parameters have no shape until the first batch"
            if not self._no_estimate:
                meta.update_copy(whole, module)
                memory = meta.measure(whole, self._optimizers or ())
                estimate = strategy.memory_per_rank(memory, trainer.world_size)
                if self._optimizers is None:
                    estimate = estimate.plus(0, "without the state of an optimizer that the strategy makes")
        memory_of_ranks = RankMemory(strategy.display_name, trainer.world_size, estimate, self._no_estimate)
        return describe_model(whole, self.max_depth, self._shapes, memory_of_ranks)

    def _show(self, trainer: Trainer, description: ModelDescription) -> None:
        width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
        trainer.print(as_text(description, width))


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """Return a table of the layers of ``module``, as :class:`ModelSummary` prints it, then the totals.

    Args:
        module: whole, on any device.
        max_depth: how deep to list: 1 for the model's children, 2 for theirs too, -1 for all.
    """
    shapes = find_shapes(module, max_depth, CPUAccelerator(), torch.device("cpu"))
    return as_text(describe_model(module, max_depth, shapes))


def as_text(description: ModelDescription, width: int | None = None) -> str:
    """Return a description as tables of plain text.

    Args:
        description: of a model.
        width: that of the terminal, in characters. Where one table doesn't fit, the shapes are in a second one, and
            longer lines of the totals are wrapped. None: as wide as it comes.
    """
    rows = description.rows()
    lines = _table(rows)
    if width is not None and lines and len(lines[1]) > width and len(rows[0]) > _BEFORE_SHAPES:
        shapes = _table([(row[0], *row[_BEFORE_SHAPES:]) for row in rows])
        lines = [*_table([row[:_BEFORE_SHAPES] for row in rows]), "", *shapes]
    return "\n".join([*lines, *description.totals(width)])


_BEFORE_SHAPES = COLUMNS.index("input")


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    align = "".join(">" if title in NUMBERS else "<" for title in rows[0])
    lines = format_table(rows, align=align)
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
