"""ACC: a loader that the accelerator puts around another one gives the same batches, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from torchhal.accelerators import Accelerator
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext

_SAMPLES, _BATCH, _FAULT = 20, 3, 13


class _Numbers(Dataset[Any]):
    """Samples with their index; one of them may be broken."""

    def __init__(self, broken: int = -1) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise LookupError(f"sample {index}")
        return {"index": index, "values": torch.full((2,), float(index))}


class _Stateful:
    """A loader that keeps its own position."""

    def __init__(self) -> None:
        self.position = self.begin = 0

    def __len__(self) -> int:
        return _SAMPLES

    def __iter__(self) -> Iterator[Any]:
        self.position, self.begin = self.begin, 0
        while self.position < _SAMPLES:
            self.position += 1
            yield torch.tensor([self.position - 1])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["position"]


@check("ACC-28", since="0.2", needs=["device"], after=("ACC-12",))
def processed_loader(context: CheckContext) -> None:
    """What process_dataloader returns gives the loader's batches in their order, as often as it is iterated.

    Two iterators at once don't disturb each other, ``len`` is the loader's, an error of the dataset is raised at its
    batch, an iterator that is closed before its end leaves no thread, and a state is as of the batch given last.

    Why: a loader that reads ahead loses a batch at an epoch's end, or trains a resumed run on other data, silently.
    Fix: take batches from one iterator of the loader in order; hand errors over in their place; close() joins threads.
    """
    accelerator, device = context.setup_accelerator()
    threads = set(threading.enumerate())
    loader = DataLoader(_Numbers(), _BATCH)
    made = accelerator.process_dataloader(loader, device)
    require(isinstance(made, Iterable), f"process_dataloader must return an iterable (got {made!r})")
    require(not isinstance(made, Iterator), f"process_dataloader must not return an iterator (got {made!r})")
    if isinstance(made, Sized):
        same("len() of the processed loader", len(made), len(loader))
    expected = [batch["index"].tolist() for batch in loader]
    for time_ in ("first", "second"):
        same(f"the batches of the {time_} epoch", _indices(made), expected)
    two = [iter(made), iter(made)]
    taken = [[_index(next(iterator)) for iterator in two] for _ in range(2)]
    same("the batches of two iterators at once", taken, [[batch] * 2 for batch in expected[:2]])
    for iterator in two:
        close_loader(iterator)
    close_loader(made)
    _require_error_in_place(accelerator, device, expected)
    _require_state(accelerator, device)
    deadline = time.monotonic() + 5
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.02)
    require(not left, f"threads are left: {', '.join(sorted(thread.name for thread in left))}")


class _Recorded:
    """A loader that records the threads in which its iterators are made."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        self.threads.append(threading.get_ident())
        return iter([torch.tensor([number]) for number in range(3)])


@check("ACC-70", since="0.2", needs=["device"], after=("ACC-28",))
def iterator_made_at_once(context: CheckContext) -> None:
    """iter() of what process_dataloader returns makes the loader's iterator before it returns, in the calling thread.

    It makes one for each of its own, and process_dataloader itself makes none.

    Why: making one draws random numbers and starts worker processes; later, or elsewhere, the order of the samples is
    another one than on other hardware, or on the next run.
    Fix: call iter(loader) in __iter__ itself, which is then no generator function.
    """
    accelerator, device = context.setup_accelerator()
    loader = _Recorded()
    made = accelerator.process_dataloader(loader, device)
    require(not loader.threads, "process_dataloader made an iterator of the loader, before iter() was called")
    iterator = iter(made)
    told = "iter() must make the loader's iterator before it returns, in the calling thread"
    where = "another thread" if loader.threads else "no iterator was made"
    require(loader.threads == [threading.get_ident()], f"{told} (got {where})")
    close_loader(iterator)
    shuffled = DataLoader(_Numbers(), _BATCH, shuffle=True)
    draws = []
    for one in (shuffled, accelerator.process_dataloader(shuffled, device)):
        torch.manual_seed(context.component.seed)
        iterator = iter(one)
        draws.append(torch.rand(3))
        close_loader(iterator)
    same("the random numbers after iter(), beside those after iter() of the loader itself", draws[1], draws[0])
    close_loader(made)


def _require_error_in_place(accelerator: Accelerator, device: torch.device, expected: list[list[int]]) -> None:
    made = accelerator.process_dataloader(DataLoader(_Numbers(_FAULT), _BATCH), device)
    iterator, got = iter(made), []
    with contextlib.suppress(LookupError):
        while True:
            got.append(_index(next(iterator, None)))
            if got[-1] is None:
                break
    same("the batches before an error of the dataset", got, expected[: _FAULT // _BATCH])
    close_loader(iterator)
    close_loader(made)


def _require_state(accelerator: Accelerator, device: torch.device) -> None:
    """Require that a state, if what is made of a stateful loader offers one, is as of the batch that was given last."""
    first: Any = accelerator.process_dataloader(_Stateful(), device)
    if not (hasattr(first, "state_dict") and hasattr(first, "load_state_dict")):
        return
    iterator = iter(first)
    for _ in range(4):
        next(iterator)
    state = first.state_dict()
    close_loader(iterator)
    second: Any = accelerator.process_dataloader(_Stateful(), device)
    second.load_state_dict(state)
    rest = [int(batch) for batch in second]
    same("the batches after a state of four", rest, list(range(4, _SAMPLES)))
    loader = _Stateful()
    loader.load_state_dict(state)
    same("the loader's own batches after that state", [int(batch) for batch in loader], rest)
    close_loader(first)
    close_loader(second)


def _index(batch: Any) -> list[int] | None:
    return None if batch is None else batch["index"].tolist()


def _indices(made: Any) -> list[Any]:
    return [_index(batch) for batch in made]


def close_loader(what: Any) -> None:
    """Close a processed loader, or an iterator of one, where it can be."""
    close = getattr(what, "close", None)
    if close is not None:
        close()
