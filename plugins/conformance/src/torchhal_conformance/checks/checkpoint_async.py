"""CIO: an asynchronous save takes a snapshot, reports its errors, and is durable after wait()."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from torchhal_conformance._assertions import raises, same
from torchhal_conformance._check import check
from torchhal_conformance._component_under_test import ComponentUnderTest
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import MIB, save, slow_data, small_checkpoint


@check("CIO-17", features=["async"])
def snapshot(context: CheckContext) -> None:
    """What changes after save_checkpoint has returned is not in the checkpoint.

    Why: training goes on while the save does; a mixture of two steps loads without an error.
    Fix: copy every value before returning.
    """
    io, path = context.create(), context.folder / "x.ckpt"

    def state_at_first() -> dict[str, Any]:
        rest = {"w": torch.zeros(4 * MIB), "list": [1], "optimizer": {"step": torch.tensor(1)}}
        return {"before": slow_data(), **rest}

    state = state_at_first()
    io.save_checkpoint(state, path)
    state["list"].append(2)
    state["w"].add_(1)
    state["optimizer"]["step"].add_(1)
    io.wait()
    expected = state_at_first()
    same("what was saved before the change", io.load_checkpoint(path), expected)


@check("CIO-18", features=["async"])
def late_error(context: CheckContext) -> None:
    """An error of a save is raised by the save, by wait() or by teardown(), once.

    The IO works afterwards, and again after teardown().

    Why: an exception lost in a thread means days of training without a checkpoint.
    Fix: keep the thread's exception and raise it at the next call.
    """
    io, blocked = context.create(), context.folder / "file"
    blocked.write_text("a file, so no folder")

    def fail() -> None:
        io.save_checkpoint(small_checkpoint(), blocked / "x.ckpt")
        io.wait()

    raises("a save into a file", Exception, fail)
    io.wait()
    for value in (1, 2):
        save(io, small_checkpoint(value), context.folder / "x.ckpt")
        same("a later save", io.load_checkpoint(context.folder / "x.ckpt"), small_checkpoint(value))
        io.teardown()

    def fail_at_teardown() -> None:
        io.save_checkpoint(small_checkpoint(), blocked / "x.ckpt")
        io.teardown()

    raises("a save into a file, then teardown()", Exception, fail_at_teardown)


@check("CIO-19", features=["async"])
def last_wins(context: CheckContext) -> None:
    """Of several saves to one path the last one counts.

    Why: "last.ckpt" is written every time; an older save that finishes later takes the run back.
    Fix: one save in flight at a time, or one queue per path.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    io.save_checkpoint({"value": 1, "large": torch.ones(4 * MIB)}, path)
    io.save_checkpoint({"value": 2}, path)
    io.wait()
    same("the value after two saves", io.load_checkpoint(path)["value"], 2)


def _load_elsewhere(component: ComponentUnderTest, path: str) -> Any:
    return pickle.dumps(component.create().load_checkpoint(path))


@check("CIO-20", needs=["posix"], after=("CIO-01",))
def another_process(context: CheckContext) -> None:
    """When a save has returned, or wait() has, another process reads the checkpoint.

    Why: what waits in this process's buffers is not there for the evaluation, nor after a crash.
    Fix: flush, fsync and close before returning.
    """
    io, path = context.create(), context.folder / "x.ckpt"
    for value in (1, 2):
        save(io, small_checkpoint(value), path)
        loaded = pickle.loads(context.run_in_subprocess(_load_elsewhere, context.component, str(path)))
        same("what another process loads", loaded, small_checkpoint(value))
