"""CIO-70: what saves and loads leave behind in their process."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch

from torchhal_conformance._assertions import require
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance._torch_globals import torch_state
from torchhal_conformance.checks._checkpoint_samples import save, small_checkpoint
from torchhal_conformance.checks._process_state import process_state


@check("CIO-70", since="0.2", needs=["posix"], after=("CIO-01",))
def surroundings(context: CheckContext) -> None:
    """Saves, loads, lists, links and removals leave the process as it was.

    That is its working folder, environment and signal handlers, torch's switches such as the default dtype, and the
    state of random numbers.

    Why: a save that changes the working folder breaks every relative path of the program, far from the save.
    Fix: restore in a finally block what a library behind the IO changes.
    """
    io, path = context.create(), context.folder / "run" / "x.ckpt"
    calls: dict[str, Callable[[], Any]] = {
        "save_checkpoint()": lambda: save(io, small_checkpoint(1), path),
        "load_checkpoint()": lambda: io.load_checkpoint(path),
        "exists()": lambda: io.exists(path),
        "recognizes()": lambda: io.recognizes(path),
        "list_checkpoints()": lambda: io.list_checkpoints(path.parent),
        "link_checkpoint()": lambda: io.link_checkpoint(path, path.with_name("y.ckpt")),
        "remove_checkpoint()": lambda: io.remove_checkpoint(path),
        "teardown()": io.teardown,
    }
    for _ in range(2):  # what the first use of a library sets up, such as a handler, is seen in it too
        for what, call in calls.items():
            before = _surroundings()
            call()
            after = _surroundings()
            names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
            changed = "; ".join(f"{name} (before {before.get(name)!r}, now {after.get(name)!r})" for name in names)
            require(not names, f"{what} changed {changed}")


def _surroundings() -> dict[str, Any]:
    return {
        **process_state(),
        **{f"the variable {name}": value for name, value in os.environ.items()},
        **torch_state(),
        "torch's random numbers": hash(torch.get_rng_state().numpy().tobytes()),
        "Python's random numbers": hash(random.getstate()),
    }
