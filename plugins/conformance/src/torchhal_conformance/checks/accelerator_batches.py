"""ACC-50 to ACC-53: batches that are kept, that share memory or fail, and epochs after the first."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from torchhal.accelerators import Accelerator
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext
from torchhal_conformance.checks.accelerator_loaders import close_loader

_KEPT = 6


@check("ACC-50", since="0.2", needs=["device"], after=("ACC-12",))
def kept_batches(context: CheckContext) -> None:
    """What batch_to_device and the processed loader have given keeps its values, however many batches come after it.

    Why: a metric's targets, a replay buffer, predictions that are views of their batch: all have the values of a later
    batch where buffers are used again.
    Fix: give memory out once; the allocator is what uses it again.
    """
    accelerator, device = context.setup_accelerator()
    rows = torch.arange(_KEPT * 8, dtype=torch.float32).reshape(_KEPT, 4, 2)
    moved = [accelerator.batch_to_device({"x": row.clone(), "y": [row[0].clone()]}, device) for row in rows]
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    made = accelerator.process_dataloader(loader, device)
    given = [accelerator.batch_to_device(batch, device) for batch in made]
    accelerator.synchronize(device)
    for number, row in enumerate(rows):
        told = f"after {_KEPT} batches, batch {number}"
        same(f"{told} of batch_to_device", moved[number]["x"].cpu(), row)
        same(f"{told} of batch_to_device, in a list", moved[number]["y"][0].cpu(), row[0])
        same(f"{told} of the processed loader", given[number].cpu(), row)
    close_loader(made)


@check("ACC-51", since="0.2", needs=["device"], after=("ACC-12",))
def views_of_one_memory(context: CheckContext) -> None:
    """Tensors that begin at one address arrive with their own values, conjugated and of other dtypes, too.

    Such are views in one batch, and the tensors of later batches in memory that was written or allocated anew.

    Why: a matrix and its transpose have one address, one shape and one dtype; the model trains on one of them twice.
    A loader fills one buffer again and again, and the model trains on its first batch in all epochs.
    Fix: copy each tensor of each batch; tell those of one batch apart by identity, and keep none for a later batch.
    """
    accelerator, device = context.setup_accelerator()
    _later_batches_of_one_address(accelerator, device)
    square = torch.randn(4, 4, generator=context.generator())
    pairs = {"real": square, "as integers": square.view(torch.int32)}
    batch: dict[str, Any] = {
        "a matrix": square, "its transpose": square.t(), "its first rows": square[:2], "its rows by twos": square[::2],
        "its diagonal": square.diagonal(), "its first row, repeated": square[:1].expand(4, 4),
        "its elements, flat": square.view(-1)[:4], **pairs,
    }  # fmt: skip
    try:
        numbers = torch.randn(3, 3, dtype=torch.complex64, generator=context.generator())
        numbers.to(device)
    except (RuntimeError, TypeError, NotImplementedError):  # no complex numbers there
        pass
    else:
        batch |= {
            "complex numbers": numbers,
            "their conjugates": numbers.conj(),
            "conjugate and transposed": numbers.mH,
        }
        batch |= {"their imaginary parts": numbers.imag, "those of the conjugates": numbers.conj().imag}
    expected = {name: tensor.clone() for name, tensor in batch.items()}
    for order in (list(batch), list(reversed(batch))):
        moved = accelerator.batch_to_device({name: batch[name] for name in order}, device)
        accelerator.synchronize(device)
        for name in order:
            same(f"{name}, beside others at the same address", moved[name].cpu(), expected[name])


def _later_batches_of_one_address(accelerator: Accelerator, device: torch.device) -> None:
    buffer = torch.zeros(2, 3)
    for number in range(_KEPT):
        expected = torch.full((2, 3), float(number))
        buffer.copy_(expected)
        for told, batch in (("a bare tensor", buffer), ("a tensor in a dict", {"x": buffer})):
            moved = accelerator.batch_to_device(batch, device)
            accelerator.synchronize(device)
            got = moved["x"] if isinstance(moved, dict) else moved
            same(f"batch {number}, {told} that was written to after the batch before", got.cpu(), expected)
        new = expected + 100  # it often gets the memory of the one that the last round has freed
        same(f"batch {number}, of new memory", accelerator.batch_to_device(new, device).cpu(), expected + 100)
        del new


class _Fails(Dataset[Any]):
    """Ten samples, of which one raises an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 7:
            raise self.error
        return torch.tensor(index)


@check("ACC-52", since="0.2", needs=["device"], after=("ACC-28",))
def errors_of_the_dataset(context: CheckContext) -> None:
    """An error of the dataset comes out of the processed loader as the type that it is, at its batch: IndexError too.

    Why: an index that is out of range in one sample of a million ended each epoch there, in silence.
    Fix: catch StopIteration of next(iterator) alone.
    """
    accelerator, device = context.setup_accelerator()
    for error in (IndexError("seven"), KeyError("seven"), EOFError("seven"), OSError(5, "seven"), ValueError("seven")):
        made = accelerator.process_dataloader(DataLoader(_Fails(error), 2), device)
        got: list[list[int]] = []
        raised: Exception | None = None
        try:
            for batch in made:
                got.append(batch.tolist())
        except Exception as found:
            raised = found
        told = f"{type(error).__name__} of a sample must come out of the loader's iterator"
        require(type(raised) is type(error), f"{told} (got {raised!r} after {len(got)} batches)")
        same(f"the batches before a {type(error).__name__}", got, [[0, 1], [2, 3], [4, 5]])
        close_loader(made)


class _Augmented(Dataset[Any]):
    """Samples that are other ones each time, as of an augmentation."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(2)


@check("ACC-53", since="0.2", needs=["device"], after=("ACC-28",))
def every_epoch_anew(context: CheckContext) -> None:
    """Each epoch of the processed loader is the loader's own: its order, its random numbers, and no earlier batch.

    A batch that was changed in place is not there again.

    Why: shuffling and augmentation of the first epoch in all others train a worse model, and nothing shows it.
    Fix: keep no batch; iterate over the loader each time.
    """
    accelerator, device = context.setup_accelerator()
    epochs = []
    for processed in (False, True):
        torch.manual_seed(context.component.seed)
        loader = DataLoader(_Augmented(), 3, shuffle=True)
        made = accelerator.process_dataloader(loader, device) if processed else loader
        found = []
        for _ in range(3):
            batches = []
            for batch in made:
                batches.append(batch.clone().cpu())
                batch.zero_()
            found.append(torch.cat(batches))
        epochs.append(torch.stack(found))
        close_loader(made)
    for number in range(3):
        same(f"the batches of epoch {number}", epochs[1][number], epochs[0][number])
