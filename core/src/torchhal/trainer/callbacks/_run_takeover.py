"""Take over the run that a fit continues, before its first step, or make the fit a run of its own."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torchhal.checkpoint import next_ns
from torchhal.trainer.callbacks._checkpoint_records import ancestors_of, new_run_id
from torchhal.trainer.callbacks._rank_agreement import decide_on_rank_zero
from torchhal.trainer.callbacks._run_ownership import Waiting, finish_without_waiting
from torchhal.trainer.callbacks._written_files import WrittenFiles

if TYPE_CHECKING:
    from torchhal import Trainer


def take_over_run(trainer: Trainer, writers: Sequence[tuple[WrittenFiles, str]]) -> None:
    """Decide which run this fit saves as, and announce a new one on rank 0. Every rank must call.

    Rank 0 may have to wait longer for another run than the other ranks wait in a collective, so it exchanges a message
    with them after each pause.

    Args:
        trainer: sets its ``run_id``.
        writers: the files and the folder of each callback that saves in this fit.
    """
    if not writers:
        return
    writers = sorted(writers, key=lambda writer: writer[0].continued is None)
    first = writers[0][0]
    run = first.run if first.continued is None else first.continued["run"]
    if trainer.ckpt_path is not None:
        pauses = _pauses(trainer, take_over(writers, wait=True))
        while decide_on_rank_zero(trainer, lambda: next(pauses, False)):
            pass
    elif trainer.is_global_zero:  # nothing is waited for, so the ranks need not communicate
        for _ in take_over(writers, wait=False):
            pass
    trainer.run_id = first.run
    if any(files.run != run for files, _ in writers):
        trainer.announce(
            f"run {run} may still live, or another process continues it: this fit saves as a run of its own, and "
            "replaces and deletes nothing of that one"
        )


def take_over(writers: Sequence[tuple[WrittenFiles, str]], *, wait: bool) -> Iterator[Waiting]:
    """Make the writers of one fit the run that they continue, in all folders; on rank 0, before the first step.

    If that run is alive, or another process continues it, they become a run of their own. One of another machine is
    alive until it has not renewed its owner file for ``EXPIRES_S``. While waiting for that, this yields, and checks
    again when it is resumed.

    Args:
        writers: each with its folder; first the one that continues from a checkpoint, if one does.
        wait: False treats a run that would have to be waited for as alive.
    """
    first, folder = writers[0]
    began_ns = next_ns()
    for files, _ in writers:
        files.began_ns = began_ns
    if first.continued is not None:
        record, taken = first.continued, False
        with suppress(Exception):  # such as a folder that takes no file: the first save there raises it
            takeover = first.ownership.take_over(folder, record["run"], record)
            taken = (yield from takeover) if wait else finish_without_waiting(takeover)
        for files, _ in writers:  # in other folders too: one run wrote them all
            files.ancestors = ancestors_of(record)
            own, files.run = files.run, record["run"]
            if not taken:
                files.become(own)
    another = new_run_id()
    for files, folder in writers:
        with suppress(Exception):
            if folder in files.ownership.held or not files.ownership.is_owned(folder, files.run):
                continue  # a new run makes no owner file before its first save
            takeover = files.ownership.take_over(folder, files.run)
            if not ((yield from takeover) if wait else finish_without_waiting(takeover)):
                files.become(another)


def _pauses(trainer: Trainer, waiting: Iterable[Waiting]) -> Iterator[bool]:
    """Yield True after each pause of a wait for another run, which is announced at its second look. On rank 0."""
    longest_s = min(1.0, trainer.strategy.timeout.total_seconds() / 4)
    looks = Counter[str]()
    for run, folder, left in waiting:
        looks[folder] += 1
        if looks[folder] == 2:
            trainer.announce(
                f"fit waits for {math.ceil(left)} s at most to see whether run {run} in {folder!r} still lives, whose "
                "process was on another host and has not said that it ended"
            )
        time.sleep(min(left, longest_s))
        yield True
