"""Write files by libraries that need a name: into a folder beside the target, then moved there when all are whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchhal.checkpoint._local_file import LocalPlace, make_folders, sync_file, sync_folder
from torchhal.checkpoint._locate import location_of
from torchhal.checkpoint._temp_files import new_temporary_name
from torchhal.checkpoint.folder import remove_stale
from torchhal.errors import CheckpointError, TorchhalError


def sibling(path: str, name: str) -> str:
    """Return the path or URL of ``name`` in the folder of ``path``."""
    place = location_of(path, {})
    if isinstance(place, LocalPlace):
        return os.path.join(os.path.dirname(place.path), name)
    return f"{path.rpartition('/')[0]}/{name}"


def refuse_existing(path: str, *, force: bool) -> None:
    """Raise CheckpointError for a folder at ``path``, and without ``force`` for anything."""
    place = location_of(path, {})
    if isinstance(place, LocalPlace) and os.path.isdir(place.path):
        raise CheckpointError(f"{path!r} is a folder, so no file can be written there: name a file in it")
    if not force and place.is_taken():
        raise CheckpointError(f"{path!r} exists already: choose another name, or replace it with --force")


@contextmanager
def staged_files(target: str) -> Iterator[Path]:
    """Yield an empty folder; the files that the block leaves in it are put beside ``target``, that one last.

    Each replaces in one step what has its name, and is durable before. After an error none is there, and no trace of
    them: errors of anything but torchhal become a CheckpointError that names ``target``.

    Args:
        target: a local path or a URL.
    """
    place = location_of(target, {})
    name = os.path.basename(place.path if isinstance(place, LocalPlace) else target)
    try:
        if isinstance(place, LocalPlace):
            folder = Path(os.path.dirname(place.path) or ".")
            make_folders(str(folder))
            remove_stale(folder)
            staging = folder / new_temporary_name()
            staging.mkdir()
            try:
                yield staging
                files = _in_order(staging, name)
                for file in files:
                    sync_file(str(file))
                for file in files:
                    os.replace(file, folder / file.name)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            sync_folder(folder)
        else:
            with tempfile.TemporaryDirectory() as local:
                yield Path(local)
                for file in _in_order(Path(local), name):
                    with location_of(sibling(target, file.name), {}).replacing() as out, file.open("rb") as source:
                        shutil.copyfileobj(source, out, 8 << 20)
    except TorchhalError:
        raise
    except Exception as error:
        raise CheckpointError(f"{target!r} could not be saved ({type(error).__name__}: {error})") from error


def _in_order(folder: Path, last: str) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda file: (file.name == last, file.name))
