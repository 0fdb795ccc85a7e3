"""CIO: an IO recognises its own checkpoints, and says how their names end."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torchhal import Module, Trainer
from torchhal.checkpoint import CheckpointIO, TorchCheckpointIO
from torchhal.trainer.callbacks import ModelCheckpoint
from torchhal_conformance._assertions import require
from torchhal_conformance._check import CheckFailed, check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks._checkpoint_samples import MIB, checkpoint_files, save, small_checkpoint

_EXTENSION = re.compile(r"(?:\.[A-Za-z0-9][A-Za-z0-9_-]*)*")


@check("CIO-30", since="0.2")
def recognition(context: CheckContext) -> None:
    """recognizes() is True for the IO's own checkpoints, also for one that is damaged behind its first bytes.

    It is False for anything else: nothing, an empty file, a text, another zip file, a folder, a link to nothing, and a
    file of core's IO unless it is in that format. It never raises, and reads little of a large checkpoint.

    Why: the Trainer asks every installed IO whose a file is; one that takes any file turns "this file is damaged" into
    "another IO has written it".
    Fix: compare the first bytes with those that a save writes, or look for the folder's own files, in a try.
    """
    io, path = context.create(), context.folder / "own.ckpt"
    save(io, {"w": torch.ones(8 * MIB // 4), **small_checkpoint()}, path)
    require(_ask(io, path, "its own checkpoint") is True, "recognizes() of its own checkpoint is False")
    require(_ask(io, str(path), "its own checkpoint, as a str") is True, "recognizes() takes a path, but no str")
    before = _bytes_read()
    io.recognizes(path)
    taken = _bytes_read() - before
    require(taken < MIB, f"recognizes() read {taken} bytes of a checkpoint of 8 MiB")
    core = TorchCheckpointIO()
    for name, other in _foreign(context.folder, torch_file=not core.recognizes(path)):
        require(_ask(io, other, name) is False, f"recognizes() of {name} is True")
    files = checkpoint_files(path)
    for file in files:
        os.truncate(file, file.stat().st_size * 9 // 10)
    cut_off = "its own checkpoint, cut off behind the first bytes"
    require(_ask(io, path, cut_off) is True, f"recognizes() of {cut_off}, is False")
    for file in files:
        os.truncate(file, min(file.stat().st_size, 3))
    _ask(io, path, "its own checkpoint, of which 3 bytes are left")
    for file in files:
        file.write_bytes(os.urandom(100))
    _ask(io, path, "its own checkpoint, overwritten")


def _ask(io: CheckpointIO, path: str | os.PathLike[str], what: str) -> object:
    try:
        found: object = io.recognizes(path)
    except Exception as error:
        raise CheckFailed(f"recognizes() of {what} raised {type(error).__name__}: {error}") from error
    require(isinstance(found, bool), f"recognizes() of {what} must return a bool (got {found!r})")
    return found


def _foreign(folder: Path, *, torch_file: bool) -> Iterator[tuple[str, Path]]:
    """Yield what is no checkpoint of the IO's, with a description of each."""
    yield "a missing file", folder / "missing.ckpt"
    for name, content in {"an empty file": b"", "a text": b"epoch,loss\n0,0.5\n", "zeros": bytes(4096)}.items():
        (folder / name).write_bytes(content)
        yield name, folder / name
    with zipfile.ZipFile(folder / "other.zip", "w") as file:
        file.writestr("weights/0.npy", bytes(1000))
    yield "another zip file", folder / "other.zip"
    (folder / "inner").mkdir()
    (folder / "inner" / "own.ckpt").write_text("hello")
    yield "a folder with a text in it", folder / "inner"
    yield "a text that is called as a checkpoint", folder / "inner" / "own.ckpt"
    try:
        (folder / "nowhere.ckpt").symlink_to(folder / "missing.ckpt")
    except OSError:  # a system without links
        pass
    else:
        yield "a link to nothing", folder / "nowhere.ckpt"
    if torch_file:
        TorchCheckpointIO().save_checkpoint(small_checkpoint(), folder / "core.ckpt")
        yield "a file of core's IO 'torch'", folder / "core.ckpt"


def _bytes_read() -> int:
    """Return the bytes that this process has read so far, where the system counts them; else 0."""
    try:
        counts = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return 0
    return int(counts.partition("rchar: ")[2].split()[0])


@check("CIO-31", since="0.2")
def extension(context: CheckContext) -> None:
    """The extension is "" or a suffix such as ".ckpt"; a run's checkpoints end in it, and the run finds them again.

    Why: a suffix without its dot, or with a slash in it, makes names that no listing shows.
    Fix: extension = ".acme", a class attribute.
    """
    io = context.create()
    ending: Any = io.extension
    require(isinstance(ending, str), f"the extension must be a str (got {ending!r})")
    require(
        _EXTENSION.fullmatch(ending), f'the extension must be "" or letters and digits behind a dot (got {ending!r})'
    )
    folder = context.folder / "run"

    def fit(max_epochs: int, **arguments: Any) -> tuple[str, str | None]:
        """Return the path of the checkpoint that is saved, and of the one that the run went on from."""
        callback = ModelCheckpoint(folder, "{step}")
        trainer = Trainer(
            accelerator="cpu", devices=1, plugins=[context.create(), "local"], max_epochs=max_epochs, logger=False,
            callbacks=[callback], enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(_Net(), [torch.ones(2, 2), torch.ones(2, 2)], **arguments)
        return str(callback.best_model_path), trainer.ckpt_path

    saved, _ = fit(1)
    name = os.path.basename(saved)
    require(name == f"step=2{ending}", f"the run's checkpoint must be called 'step=2{ending}' (got {name!r})")
    _, found = fit(2, ckpt_path="last")
    require(found == saved, f"ckpt_path='last' must find {saved!r} (got {found!r})")


class _Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)
