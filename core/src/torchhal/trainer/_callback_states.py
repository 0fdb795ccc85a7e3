"""Save and load the states of callbacks, each under a unique key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchhal.errors import CheckpointMismatchError
from torchhal.trainer.callbacks import Callback


def callback_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """``{key: state}`` of the callbacks that keep one."""
    states = {}
    for callback, key in zip(callbacks, _keys(callbacks), strict=True):
        state = callback.state_dict() if hasattr(callback, "state_dict") else None
        if state:
            states[key] = state
    return states


def load_callback_states(callbacks: Sequence[Any], states: Mapping[str, Any], path: str | None = None) -> None:
    """Load the state of its key into each callback; one without a saved state starts afresh.

    Args:
        callbacks: those of the Trainer.
        states: what :func:`callback_states` gave.
        path: the checkpoint that ``states`` come from, for messages; None for states from another process of this run.

    Raises:
        CheckpointMismatchError: a callback rejects its state, or a state could belong to several.
    """
    keys = _keys(callbacks)
    unclaimed = [saved for saved in states if saved not in keys]
    for callback, key in zip(callbacks, keys, strict=True):
        if key not in states:
            if hasattr(callback, "load_state_dict"):
                _check_nobody_elses(callback, key, unclaimed, path)
            continue
        try:
            callback.load_state_dict(states[key])
        except Exception as error:
            if path is None:
                raise
            raise _refused(callback, key, path, error) from error


def restore_optimizers(
    callbacks: Sequence[Any], states: Mapping[str, Any], trainer: Any, module: Any, path: str | None
) -> None:
    """Let each callback change the optimizers of a fit as it had while training, before their states are loaded.

    Args:
        callbacks: those of the Trainer.
        states: what :func:`callback_states` gave for the checkpoint that the fit continues from; {} without one.
        trainer: the Trainer that runs.
        module: the user's model.
        path: the checkpoint, for messages.

    Raises:
        CheckpointMismatchError: a callback rejects its state.
    """
    for callback, key in zip(callbacks, _keys(callbacks), strict=True):
        if not isinstance(callback, Callback):
            continue
        try:
            callback._restore_optimizers(trainer, module, states.get(key))
        except Exception as error:
            if key not in states:
                raise
            raise _refused(callback, key, path, error) from error


def _refused(callback: Any, key: str, path: str | None, error: Exception) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{path!r} can't be continued from: {type(callback).__name__} refuses its state, the field "
        f"{f'callbacks/{key}'!r} ({type(error).__name__}: {error})"
    )


def begin_anew(callbacks: Sequence[Any], trainer_id: str) -> Callable[[], None]:
    """Reset the callbacks that have served another Trainer, as in the folds of a cross-validation.

    In a second fit of the same Trainer they continue with it.

    Args:
        callbacks: those of the Trainer that begins a fit.
        trainer_id: identifies that Trainer.

    Returns:
        A function that restores their state, for a fit that is refused; to be called after their ``teardown``.
    """
    others: list[tuple[Callback, dict[str, Any]]] = []
    for callback in callbacks:
        if not isinstance(callback, Callback) or callback._trainer_id == trainer_id:
            continue
        before = dict(vars(callback))
        if callback._trainer_id:  # else its state was set by the user
            callback._reset_state()
        forgotten = {name: value for name, value in before.items() if vars(callback).get(name) is not value}
        others.append((callback, {**forgotten, "_trainer_id": callback._trainer_id}))
        callback._trainer_id = trainer_id

    def undo() -> None:
        for callback, forgotten in others:
            vars(callback).update(forgotten)

    return undo


@contextmanager
def unchanged_by_errors(callbacks: Sequence[Any]) -> Iterator[None]:
    """Restore the attributes of ``callbacks`` if the body fails; what they have changed in place stays changed."""
    before = [dict(getattr(callback, "__dict__", {})) for callback in callbacks]
    try:
        yield
    except BaseException:
        for callback, attributes in zip(callbacks, before, strict=True):
            if hasattr(callback, "__dict__"):
                vars(callback).clear()
                vars(callback).update(attributes)
        raise


def _keys(callbacks: Sequence[Any]) -> list[str]:
    """One key for each: its ``state_key``; where several share it, the constructor's arguments and a number are added.

    So two averages with different decays get their own states back, in any order. A callback that is the only one of
    its key has the plain key, as in earlier releases.
    """
    bases = [str(_base(callback)) for callback in callbacks]
    several = Counter(bases)
    keys: list[str] = []
    for callback, base in zip(callbacks, bases, strict=True):
        key = base if several[base] == 1 else f"{base}({getattr(callback, '_made_with', '')})"
        seen = sum(key == other.partition("#")[0] for other in keys)
        keys.append(key if not seen else f"{key}#{seen + 1}")
    return keys


def _base(callback: Any) -> Any:
    return getattr(callback, "state_key", type(callback).__qualname__)


def _check_nobody_elses(callback: Any, key: str, unclaimed: Sequence[str], path: str | None) -> None:
    """Raise if the checkpoint has states of such callbacks that none of this Trainer's takes."""
    base = str(_base(callback))
    if others := [saved for saved in unclaimed if saved == base or saved.startswith(f"{base}(")]:
        raise CheckpointMismatchError(
            f"{path!r} can't be continued from: it holds {', '.join(map(repr, others))} in 'callbacks', and the "
            f"Trainer has {key!r}, so nothing says whose state is whose. Give the callbacks that the run was saved "
            "with, or each a 'state_key' of its own"
        )
