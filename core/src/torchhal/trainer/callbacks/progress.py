"""Show the progress of a run, by tqdm or in a log file by lines, seldom enough to cost nothing, with ProgressBar."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torchhal._arguments import check_bool, check_count
from torchhal.trainer._unknown_arguments import explain_unknown_arguments
from torchhal.trainer.callbacks._progress_lines import ProgressLines
from torchhal.trainer.callbacks._terminal_lines import ERASE, TerminalLines, at_rest, is_terminal
from torchhal.trainer.callbacks.base import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchhal import Trainer

_INTERVAL_S = 0.1
_INTERVAL_IN_FILE_S = 5.0  # each refresh is a line there
_LONGEST_INTERVAL_S = 60.0
_WIDTH = 80  # of a terminal that doesn't say


class ProgressBar(Callback):
    """Callback that draws a bar for training, with the values of ``prog_bar=True``, and for each evaluation.

    It draws on rank 0 only. What any rank prints meanwhile, warns or logs by Python goes above the bars, line by line;
    what C code writes to the terminal doesn't. In a notebook the bars are widgets if ipywidgets is installed.

    A batch costs one read of the clock: the bar is drawn, and values are fetched from the device, at most ten times a
    second on a terminal, and when an epoch ends. That makes 5 microseconds a step (benchmarks/trainer_step.py, the row
    "bar", on a step of 93 microseconds). Into a file it writes whole lines: when an epoch ends, and during longer ones
    after 5, 10, 20, 40 and 80 seconds, then each minute.

    Args:
        refresh_rate: draw at most every so many batches; 0 draws nothing.
        leave: leave each epoch's bar standing, rather than only the last one.
    """

    replaces = "progress_bar"

    @explain_unknown_arguments
    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        self.refresh_rate = check_count("refresh_rate", refresh_rate, minimum=0)
        self.leave = check_bool("leave", leave)
        self._enabled = True
        self._train: Any = None
        self._evaluation: Any = None
        self._evaluated = 0
        self._next_draw = 0.0
        self._interval = _INTERVAL_S
        self._is_live = True
        self._lines: TerminalLines | None = None

    def disable(self) -> None:
        """Draw nothing from now on."""
        self._enabled = False

    def enable(self) -> None:
        """Draw again from the next bar on."""
        self._enabled = True

    @property
    def is_enabled(self) -> bool:
        """True if bars are drawn."""
        return self._enabled and self.refresh_rate > 0

    @property
    def is_drawn(self) -> bool:
        """True while a bar stands on the last line."""
        return self._train is not None or self._evaluation is not None

    @property
    def line_break(self) -> str:
        """What to write before a line that goes to the terminal past ``sys.stderr``; empty if no bar is in its way."""
        return ERASE if self.is_drawn and self._lines is not None else ""

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: Any = None) -> None:
        """Print ``values`` above the bars, with the arguments of the builtin ``print``."""
        if self.is_drawn and self._is_live and self._lines is None:
            _tqdm().write(sep.join(map(str, values)), end=end, file=file or sys.stdout)  # a notebook
        else:
            print(*values, sep=sep, end=end, file=file)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no bars: they are open files of this process."""
        return {**self.__dict__, "_train": None, "_evaluation": None, "_lines": None}

    # -- training ----------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if self._train is not None and self.leave:
            self._train.close()
            self._train = None
        title, total = f"Epoch {trainer.current_epoch}", _total(trainer.num_training_batches)
        if self._train is None:
            self._train = self._open(trainer, title, leave=True, total=total)
        else:
            self._train.set_description_str(title, refresh=False)
            self._train.reset(total)
        if self._train is not None:  # a resumed epoch starts in the middle; its speed is measured from there
            self._train.initial = self._train.n = self._train.last_print_n = trainer.fit_loop.batches_done
            self._emit()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._train is None or time.monotonic() < self._next_draw or (batch_idx + 1) % self.refresh_rate:
            return
        self._draw_training(trainer, batch_idx + 1)

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if self._train is not None:
            self._draw_training(trainer, trainer.fit_loop.batches_done)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self._close()

    def _draw_training(self, trainer: Trainer, done: int) -> None:
        bar = self._train
        bar.n = done
        self._set_values(bar, trainer.progress_bar_metrics)
        self._refresh(bar)
        self._schedule()

    def _set_values(self, bar: Any, metrics: Mapping[str, float]) -> None:
        values = [f"{name}={value:.4g}" for name, value in metrics.items()]
        bar.set_postfix_str(", ".join(self._fitting(bar, values)), refresh=False)

    def _fitting(self, bar: Any, values: list[str]) -> list[str]:
        """Return those of ``values`` that the bar's line has room for, one at least; tqdm would cut one in two."""
        if self._lines is None:
            return values
        drawn = bar.format_dict
        others = len(bar.format_meter(**{**drawn, "ncols": None, "postfix": None}))  # the bar in it has ten characters
        room = (drawn["ncols"] or _WIDTH) - others
        count, text = len(values), ", ".join(["", *values])
        while count > 1 and len(text) > room:
            count -= 1
            text = ", ".join(["", *values[:count], "..."])
        return values if count == len(values) else [*values[:count], "..."]

    def _refresh(self, bar: Any) -> None:
        if self._lines is not None:
            self._lines.begin()
            if bar is self._evaluation and self._train is not None:  # another rank's line may have erased both
                self._train.refresh()
        bar.refresh()
        self._emit()

    def _emit(self) -> None:
        """Write what was drawn to the terminal, in one piece."""
        if self._lines is not None:
            self._lines.drawing.emit()

    def _schedule(self) -> None:
        """Set the time of the next drawing within a stage."""
        self._next_draw = time.monotonic() + self._interval
        if not self._is_live:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL_S)

    # -- evaluation --------------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer, title: str, batches: Any) -> None:
        self._close_evaluation()
        if self._train is not None and self._is_live:  # it is not drawn again until the evaluation ends
            self._draw_training(trainer, trainer.fit_loop.batches_done)
        self._evaluation = self._open(trainer, title, leave=trainer.state.fn != "fit", total=_total(batches))
        self._evaluated = 0

    def _advance(self) -> None:
        self._evaluated += 1
        if self._evaluation is None or time.monotonic() < self._next_draw or self._evaluated % self.refresh_rate:
            return
        self._evaluation.n = self._evaluated
        self._refresh(self._evaluation)
        self._schedule()

    def _finish(self, trainer: Trainer) -> None:
        bar = self._evaluation
        if bar is not None and (self._is_live or bar.leave):  # in a fit, the epoch's line has the values
            bar.n = self._evaluated
            self._set_values(bar, trainer.progress_bar_metrics)
            self._refresh(bar)
        self._close_evaluation()

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.sanity_checking:
            self._start(trainer, "Sanity check", trainer.num_sanity_val_batches)
        else:
            self._start(trainer, "Validating", trainer.num_val_batches)

    def on_validation_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance()

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self._finish(trainer)

    def on_test_start(self, trainer: Trainer, module: Any) -> None:
        self._start(trainer, "Testing", trainer.num_test_batches)

    def on_test_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance()

    def on_test_end(self, trainer: Trainer, module: Any) -> None:
        self._finish(trainer)

    def on_predict_start(self, trainer: Trainer, module: Any) -> None:
        self._start(trainer, "Predicting", trainer.num_predict_batches)

    def on_predict_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._advance()

    def on_predict_end(self, trainer: Trainer, module: Any) -> None:
        self._finish(trainer)

    # -- bars --------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Trainer, module: Any, stage: str) -> None:
        self._close()
        if self._lines is not None:
            self._lines.restore()
            self._lines = None

    def _open(self, trainer: Trainer, title: str, *, leave: bool, total: int | None = None) -> Any:
        if not self.is_enabled or sys.stderr is None:
            return None
        on_terminal = is_terminal(sys.stderr)
        if self._lines is None and on_terminal and os.name == "posix":  # elsewhere not each terminal knows the codes
            self._lines = TerminalLines(self._drawn)
        if not trainer.is_global_zero:
            return None
        self._is_live = on_terminal or _is_notebook()
        self._interval = _INTERVAL_S if self._is_live else max(self._interval, _INTERVAL_IN_FILE_S)
        self._next_draw = time.monotonic() + self._interval
        if not self._is_live:
            return ProgressLines(desc=title, total=total, leave=leave, file=sys.stderr)
        bar = self._make_bar(title, total, leave)
        self._emit()
        return bar

    def _make_bar(self, title: str, total: int | None, leave: bool) -> Any:
        """Return a bar that draws over itself, with the methods of ``ProgressLines``."""
        return _tqdm()(
            desc=title,
            total=total,
            leave=leave,
            position=1 if self._train is not None else 0,
            dynamic_ncols=True,
            file=sys.stderr if self._lines is None else self._lines.drawing,
            mininterval=0,
            smoothing=0,
        )

    def _drawn(self) -> str:
        """Return what stands on the terminal, with the cursor on its first character."""
        return at_rest("\n".join(str(bar) for bar in (self._train, self._evaluation) if bar is not None))

    def _close(self) -> None:
        self._close_evaluation()
        if self._train is not None:
            self._train.close()
            self._train = None
        self._emit()

    def _close_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None
            self._emit()


def _total(batches: Any) -> int | None:
    """Return the number of batches of all loaders; None where one has no length."""
    total = sum(batches) if isinstance(batches, list | tuple) else batches
    return None if math.isinf(total) or not total else int(total)


def _is_notebook() -> bool:
    """Return whether tqdm draws widgets here."""
    return "notebook" in _tqdm().__mro__[1].__module__


@lru_cache(maxsize=1)
def _tqdm() -> Any:
    """Return the bar class of tqdm for a terminal or a notebook, without its helper thread and its process lock.

    Neither is needed for bars of one thread, and both are in the way of a process that forks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about widgets that are not installed
        from tqdm.autonotebook import tqdm

    bar: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    bar.set_lock(threading.RLock())
    return bar
