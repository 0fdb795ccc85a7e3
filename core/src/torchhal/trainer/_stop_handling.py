"""Save, log and requeue a run that a signal stops."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torchhal.checkpoint._location import is_url
from torchhal.cluster import ClusterEnvironment
from torchhal.cluster._job import Job, current_job
from torchhal.errors import TorchhalError
from torchhal.trainer import _checkpointing as checkpointing
from torchhal.trainer.run_state import RunState

_REQUEUE_TIMEOUT = timedelta(minutes=5)

_STOPPING = "torchhal: stopping after this step; press Ctrl-C again to stop at once"

_STOPPING_SEARCH = "torchhal: stopping the search after this step; press Ctrl-C again to stop at once"


def job_of(run: RunState) -> ClusterEnvironment | Job:
    """Return the environment or job whose signals announce the end of this run, and which may requeue it.

    A strategy of one process has no environment, and may be in a scheduler's job all the same.
    """
    environment = run.strategy.cluster_environment
    return current_job() if environment is None else environment


def stopping_notice(run: RunState) -> str:
    """Return the message for the first Ctrl-C, on a separate line.

    A progress bar has not ended its line, nor has the terminal that shows ``^C``.
    """
    bar = run.progress_bar_callback
    line_break = "" if bar is None else bar.line_break
    return (line_break or ("\n" if os.isatty(2) else "")) + (_STOPPING_SEARCH if _is_search(run) else _STOPPING)


def _is_search(run: RunState) -> bool:
    """Return whether the user has asked for trials, rather than for a fit that is planned."""
    return run.is_trial and run.auto is None


def save_interrupted(run: RunState, signum: int) -> None:
    try:
        for callback in run.checkpoint_callbacks:
            callback.save_interrupted(run.trainer)
    except Exception:
        if run.is_global_zero:
            name, last = signal.Signals(signum).name, checkpointing.last_checkpoint(run)
            what = "run" if run.by_hand else "fit"
            run.print(
                f"torchhal: {what} stopped on {name} at step {run.global_step}, which could not be saved, so no "
                f"scheduler is asked for another life. The newest checkpoint is {last or 'none'}",
                file=sys.stderr,
            )
        raise


def log_stop(run: RunState, fn: str, signum: int, *, begun: bool = True, left: int | None = None) -> None:
    """Log one line on where a signal stopped the job, in its steps or before it had ``begun`` them.

    ``left``: the rank that left at once, so that nothing could be saved; None where all stopped together.
    """
    if not run.is_global_zero or (run.is_trial and signum == signal.SIGINT):  # its notice has said it
        return
    if run.is_trial:  # whose steps mean nothing to the user
        what = "search stopped" if _is_search(run) else f"{fn} stopped before its first step,"
        run.print(f"torchhal: {what} on {signal.Signals(signum).name}", file=sys.stderr)
        return
    where = "" if left is None else f", as rank {left} left at once"
    saved = [callback.interrupted_path for callback in run.checkpoint_callbacks if callback.interrupted_path]
    if fn == "fit" and saved and left is None:
        where = f"; saved {saved[0]}, continue with ckpt_path='last'"
    name = signal.Signals(signum).name
    at = f"at step {run.global_step}{where}" if begun else "before it began"
    run.print(f"torchhal: {'run' if run.by_hand else fn} stopped on {name} {at}", file=sys.stderr)


def set_hang_folder(run: RunState, folder: str) -> None:
    """Set the folder for the dumps of hanging ranks; a remote folder would be too slow."""
    if not is_url(folder):
        run.strategy.watch.hang.run_folder = folder


def requeue(run: RunState, ckpt_path: Any, signum: int) -> None:
    """Let the scheduler requeue the job, if its next start continues from here."""
    job = job_of(run)
    if run.is_global_zero:
        continues = ckpt_path == "last" and checkpointing.last_checkpoint(run) is not None
        if said := job.run_again(signum, continues=continues):
            run.print(f"torchhal: {said}", file=sys.stderr)
    # A rank that exits may end the others, and with them the request. The scheduler may take longer than a collective's
    # time-out; and this process exits with the signal's code, whether the others arrive or not.
    with suppress(TorchhalError):
        run.strategy.watch.barrier("requeue", _REQUEUE_TIMEOUT)
