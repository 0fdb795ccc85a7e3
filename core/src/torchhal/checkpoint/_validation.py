"""Inspect a checkpoint before a byte is written, in one walk without copies.

The walk checks two properties. A value that a ``weights_only`` load would refuse fails the save, while the run can
still save something else. Tensors that are small views of large memory are found, as torch.save would write all of
that memory.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import serialization

from torchhal.checkpoint._storage_compaction import StorageCompactor
from torchhal.errors import CheckpointError

# A load with weights_only accepts all values of exactly these types, in every torch since 2.6.
_PLAIN = frozenset({type(None), bool, float, str, torch.Size, torch.dtype, torch.device})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_CONTAINERS = _MAPPINGS | {list, tuple, set}
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_INT_END = 1 << (8 * 255 - 1)  # the first integer too long for the pickle opcode that such a load supports

_Where = tuple[Any, str, Any]  # (where its container is, kind of step, key): made into text only for an error


def inspect_contents(checkpoint: dict[str, Any]) -> dict[int, torch.Tensor]:
    """Return the tensors to write in place of others, by the id of those others; usually none.

    Those in place of small views of large memory are copies without the rest of that memory.

    Args:
        checkpoint: what is to be saved; not changed.

    Raises:
        CheckpointError: a value can't be saved, or a ``weights_only`` load would refuse it; with its place.
    """
    views = StorageCompactor()
    unknown: list[tuple[Any, _Where]] = []
    seen = {id(checkpoint)}
    stack: list[tuple[Any, _Where]] = [(checkpoint, (None, "", "checkpoint"))]
    while stack:
        container, where = stack.pop()
        if type(container) in _MAPPINGS:
            for key in container:
                if type(key) is not str:
                    _sort(key, (where, "key", key), views, unknown, seen, stack)
            if type(container) is OrderedDict and container.__dict__:  # a state_dict's _metadata
                stack.append((container.__dict__, (where, ".", "__dict__")))
            steps = container.items()
        else:
            steps = enumerate(container)
        for key, value in steps:
            if type(value) not in _PLAIN:
                _sort(value, (where, "[]", key), views, unknown, seen, stack)
    _refuse(unknown, views)
    return views.replacements()


def _sort(
    value: Any,
    where: _Where,
    views: StorageCompactor,
    unknown: list[tuple[Any, _Where]],
    seen: set[int],
    stack: list[tuple[Any, _Where]],
) -> None:
    kind = type(value)
    if kind in _TENSORS:
        if id(value) not in seen:
            seen.add(id(value))
            views.add(value)
            if value.__dict__:  # attributes are saved too
                stack.append((value.__dict__, (where, ".", "__dict__")))
    elif kind is int:
        if not -_INT_END <= value < _INT_END:
            raise CheckpointError(
                f"{_text(where)} holds an integer of {value.bit_length()} bits, and a weights_only load takes 2039. "
                f"Save it as text"
            )
    elif kind in _CONTAINERS:
        if id(value) not in seen:
            seen.add(id(value))
            stack.append((value, where))
    elif kind not in _PLAIN and not (kind is bytes and value):  # an empty one is pickled as a call, which is refused
        unknown.append((value, where))


def _refuse(unknown: list[tuple[Any, _Where]], views: StorageCompactor) -> None:
    """Raise for the first value that can't be pickled or loaded again; all are tried at once, as all mostly pass."""
    if not unknown:
        return
    try:
        if _why_refused([value for value, _ in unknown], views) is None:
            return
    except Exception:
        pass
    for value, where in unknown:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        article = "an" if kind[0] in "aeiou" else "a"
        try:
            reason = _why_refused([value], views)
        except Exception as error:
            raise CheckpointError(
                f"{_text(where)} holds {article} {kind}, which can't be pickled ({type(error).__name__}: {error})"
            ) from error
        if reason is not None:
            raise CheckpointError(
                f"{_text(where)} holds {article} {kind}, and a weights_only load would refuse the file ({reason}). "
                f"Save plain data (numbers, text, lists, dicts, tensors), or allow a class of yours with "
                f"torch.serialization.add_safe_globals before saving and before loading"
            )


def _why_refused(values: list[Any], views: StorageCompactor) -> str | None:
    """Return why a load of ``values`` would be refused; None if it wouldn't. Raises what pickling raises."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, views)
    pickler.dump(values)
    archive = io.BytesIO()  # the minimum that torch accepts as a checkpoint: the pickle without its tensors' data
    with zipfile.ZipFile(archive, "w") as records:
        records.writestr("contents/data.pkl", pickled.getvalue())
        records.writestr("contents/version", "3\n")
    archive.seek(0)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(archive)
    except pickle.UnpicklingError as error:
        return str(error)
    if names:
        return f"it needs {', '.join(sorted(names))}"
    if not pickler.found_storage:
        archive.seek(0)
        try:  # Allowed names aren't enough: such a load doesn't fill a dict or list of another class, for example.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                serialization.load(archive, weights_only=True)
        except Exception as error:
            return (str(error).strip().split("WeightsUnpickler error:")[-1].strip().splitlines() or [repr(error)])[0]
    return None


class _Pickler(pickle.Pickler):
    """A pickler like torch.save's, at its protocol, that only records the data of tensors."""

    def __init__(self, file: io.BytesIO, views: StorageCompactor) -> None:
        super().__init__(file, protocol=2)
        self.found_storage = False
        self._views = views

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            obj = obj._untyped_storage
        elif not torch.is_storage(obj):
            return None
        self.found_storage = True
        self._views.keep(obj)
        return "storage"


def _text(where: _Where) -> str:
    above, step, key = where
    if above is None:
        return str(key)
    if step == "key":
        return f"a key of {_text(above)} ({key!r:.80})"
    if step == ".":
        return f"{_text(above)}.{key}"
    return f"{_text(above)}[{key!r:.80}]"
