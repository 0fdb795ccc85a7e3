"""Name the owner of per-rank state in a checkpoint, and refuse such state to another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchhal.errors import CheckpointMismatchError

STATES_KEY: Final = "rank_states"
"""Field of a checkpoint with the writer of each per-rank state, by the kind of component."""


def class_name(owner: Any) -> str:
    """Return package and name of the owner's class, by which its state is recognised: ``"torchhal.DDPStrategy"``.

    The modules inside a package don't count, so that a plugin may move a class. A script is ``__main__`` however its
    process was started.
    """
    kind = type(owner)
    package = kind.__module__.partition(".")[0]
    return f"{'__main__' if package == '__mp_main__' else package}.{kind.__qualname__}"


def refuse_resharding(owner: Any, kind: str, states: Sequence[Mapping[str, Any]], *, world_size: int) -> dict[str, Any]:
    """Return an empty state if all ``states`` are empty, else raise CheckpointMismatchError.

    Args:
        owner: the strategy or the precision that continues.
        kind: ``"strategy"`` or ``"precision"``.
        states: those of the ranks that saved.
        world_size: number of ranks that continue.
    """
    if not any(states):
        return {}
    name = type(owner).__name__
    raise CheckpointMismatchError(
        f"each rank of {kind} {owner.alias or name!r} ({name}) has saved a state of its own: {len(states)} rank(s), "
        f"and {world_size} continue(s). {name} has no rule for sharing them out. Continue with {len(states)} rank(s), "
        f"override {name}.reshard_rank_state, or begin without this state: call "
        f"checkpoint[{STATES_KEY!r}].pop({kind!r}) in on_load_checkpoint"
    )
