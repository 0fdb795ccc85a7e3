"""Four checkpoint IOs with one mistake each, over torchhal's TorchCheckpointIO."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from zoo import caught_by

from torchhal.checkpoint import TorchCheckpointIO, inspect_contents, location_of, sync_folder
from torchhal.errors import CheckpointError
from torchhal.pytree import map_tensors


@caught_by("CIO-63")
class JoinsEqualTensorsIO(TorchCheckpointIO):
    """Tensors with equal contents are written once, and come back as one memory."""

    # checkpoint-io.md, load_checkpoint: "Return the checkpoint that `save_checkpoint` wrote at `path`.";
    # save_checkpoint: "Tensors that share memory still do after a load." Those that don't share it do, too.
    # Suffers: Optimizer.load_state_dict keeps the loaded tensors: moments that were equal in the file (zeros of layers
    # not trained yet, of exp_avg and exp_avg_sq) are one tensor in the resumed run, which each update changes twice.

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(checkpoint, dict):
            inspect_contents(checkpoint)  # raises for a value that can't be saved
            users: Counter[int] = Counter()
            map_tensors(checkpoint, lambda leaf: users.update(_storage(leaf)))
            first: dict[Any, torch.Tensor] = {}

            def join(leaf: Any) -> Any:
                where = _storage(leaf)
                if not where or users[where[0]] > 1 or not _is_whole(leaf):
                    return leaf
                content = hashlib.sha256(leaf.detach().reshape(-1).view(torch.uint8).numpy()).digest()
                return first.setdefault((leaf.dtype, leaf.shape, content), leaf)

            checkpoint = map_tensors(checkpoint, join)
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)


def _storage(leaf: Any) -> list[int]:
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return []
    return [leaf.untyped_storage().data_ptr()]


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether it is a plain tensor that has its memory for itself."""
    return bool(
        tensor.numel()
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


@caught_by("CIO-63")
class KeepsLastLoadedIO(TorchCheckpointIO):
    """A second load of an unchanged file returns the objects of the first one."""

    # checkpoint-io.md, load_checkpoint: "Return the checkpoint that `save_checkpoint` wrote at `path`."; "other values
    # than were saved are never returned."
    # Suffers: what loads a checkpoint trains in its tensors (Optimizer.load_state_dict keeps them): a second load of
    # the file in the run, to roll back after a NaN or a bad learning rate, returns the moments that the run has
    # reached.

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self._last: tuple[Any, dict[str, Any]] | None = None

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        version = None
        if map_location == "cpu" and weights_only is True:
            version = location_of(path, self.storage_options).version()
        if version is None:
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        key = (os.fspath(path), os.getcwd(), version)
        if self._last is None or self._last[0] != key:
            self._last = (key, super().load_checkpoint(path))
        return dict(self._last[1])

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> None:
        self._last = None
        super().save_checkpoint(checkpoint, path, **options)

    def teardown(self) -> None:
        self._last = None
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


@caught_by("CIO-64")
class SkipsUnchangedIO(TorchCheckpointIO):
    """A save to the same path is left out if no tensor has another version number and no value another value."""

    # checkpoint-io.md, save_checkpoint: "Make `checkpoint` durable at `path`, replacing all of what was there."
    # Suffers: writes that don't count as versions (through `.data`, as many optimizers and averages of weights do them,
    # or through NumPy memory) don't reach the file: "last.ckpt" keeps the weights of the first save.

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(storage_options)
        self._saved: tuple[Any, Any, Any] | None = None

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        tensors: list[torch.Tensor] = []
        try:
            outline = _outline(checkpoint, tensors)
        except RecursionError:
            outline = object()
        place = location_of(path, self.storage_options, storage_options)
        key = (os.fspath(path), os.getcwd(), place.version())
        if self._saved is not None and key[2] is not None and self._saved[:2] == (key, outline):
            return  # the same again
        self._saved = None
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        # The tensors are held, so that no other one gets their address.
        self._saved = ((*key[:2], place.version()), outline, [tensor.detach() for tensor in tensors])

    def teardown(self) -> None:
        self._saved = None
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_saved": None}


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return what is compared: numbers and text by value, tensors by memory and version."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        if value.layout is not torch.strided or value.is_inference() or value.is_quantized:
            return object()
        about = (value.data_ptr(), value._version, value.dtype, tuple(value.shape), value.stride())
        return (*about, value.is_conj(), value.is_neg(), value.requires_grad, type(value))
    if isinstance(value, Mapping):
        return type(value), [(_outline(key, tensors), _outline(value[key], tensors)) for key in value]
    if isinstance(value, list | tuple):
        return type(value), [_outline(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)
    return object()  # equal to nothing: saved again


@caught_by("CIO-66")
class SymlinksAcrossFoldersIO(TorchCheckpointIO):
    """link_checkpoint makes a symbolic link where the new name is in another folder."""

    # checkpoint-io.md, link_checkpoint: "Either may be removed and the other stays."
    # Suffers: "best/model.ckpt" as a second name of "steps/step=100.ckpt" dangles as soon as the run keeps only its
    # last checkpoints and removes that file: the best weights of the run are gone, and only the one who loads them
    # sees it.

    def link_checkpoint(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
        old, new = os.path.abspath(source), os.path.abspath(target)
        if "://" in os.fspath(source) or "://" in os.fspath(target) or os.path.dirname(old) == os.path.dirname(new):
            return super().link_checkpoint(source, target)
        if not os.path.isfile(old):
            return False
        folder = os.path.dirname(new)
        temporary = os.path.join(folder, f".link-{os.getpid()}-{threading.get_ident()}")
        try:
            if os.path.isdir(new) and not os.path.islink(new):
                raise IsADirectoryError(new)
            if os.path.exists(new) and os.path.samefile(old, new):
                return True
            os.symlink(os.path.relpath(os.path.realpath(old), os.path.realpath(folder)), temporary)
            os.replace(temporary, new)
            sync_folder(folder)
        except OSError as error:
            with suppress(OSError):
                os.unlink(temporary)
            raise CheckpointError(f"{str(target)!r} could not become a name of {str(source)!r}: {error}") from error
        return True
