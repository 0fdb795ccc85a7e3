"""Average gradients with Horovod, from hooks that run while backward does."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchhal.distributed import collectives
from torchhal.errors import DistributedError

_NATIVE = (torch.float16, torch.float32, torch.float64)
"""Dtypes that Horovod adds up."""
_NO, _DENSE, _SPARSE = 0, 1, 2
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 1e-3


@dataclass
class _Message:
    """A gradient on its way: what travels is averaged in place, and copied back where it isn't the gradient itself."""

    handle: int
    what: str
    gradient: torch.Tensor
    sent: torch.Tensor


class GradientAverager:
    """Averages the gradients of a module's parameters over all ranks.

    A dense gradient begins to travel when backward has accumulated it, and :meth:`finish` waits for all of them. Sparse
    ones are averaged in torch's process group.

    Args:
        hvd: ``horovod.torch``.
        module: whose parameters have the same names on all ranks.
        ignored: names of parameters whose gradients stay each rank's own.
        is_paused: returns True while gradients are accumulated, and not sent.
        devices: types of the devices whose tensors Horovod takes; those of others travel through host memory.
        compressed: send float32 as float16.
        finds_unused: parameters may lack a gradient, on some ranks or on all.
        timeout: the longest wait for other ranks, in seconds.
        guard: given what is waited for, returns the context in which an error of the communication is explained.
        explain_unused: returns the error for parameters without a gradient, given their names.
    """

    def __init__(
        self,
        hvd: Any,
        module: nn.Module,
        *,
        ignored: Collection[str],
        is_paused: Callable[[], bool],
        devices: Collection[str],
        compressed: bool,
        finds_unused: bool,
        timeout: float,
        guard: Callable[[str], AbstractContextManager[None]],
        explain_unused: Callable[[Sequence[str]], Exception],
    ) -> None:
        self._hvd = hvd
        self._module = module
        self._ignored = frozenset(ignored)
        self._is_paused = is_paused
        self._devices = devices
        self._share = 1 / hvd.size()
        """The factor of each rank's gradient in the average."""
        self._compressed = compressed
        self._finds_unused = finds_unused
        self._timeout = timeout
        self._guard = guard
        self._explain_unused = explain_unused
        self._names: dict[nn.Parameter, str] = {}
        self._hooks: list[Any] = []
        self._messages: dict[nn.Parameter, _Message] = {}
        self.watch()

    def watch(self) -> None:
        """Register hooks on the parameters that the module has, and trains, now.

        What is unfrozen later is averaged too, only not while backward runs.
        """
        self.remove()
        named = self._module.named_parameters()
        self._names = {parameter: name for name, parameter in named if name not in self._ignored}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
            for parameter in self._names
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Take the hooks away, and forget what is on its way."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._messages.clear()

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if self._is_paused() or parameter.grad is None or parameter.grad.is_sparse:
            return
        if parameter in self._messages:
            raise DistributedError(
                f"parameter {self._names[parameter]!r} got a second gradient in one backward, while the first was on "
                "its way to the other ranks (a checkpoint with use_reentrant=True in which it is used twice?)"
            )
        self._send(parameter)

    def _send(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        gradient = gradient.detach()
        sent = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
        if sent.device.type not in self._devices:
            sent = sent.cpu()
        # Divided before they are added up, as DistributedDataParallel does, and before they are rounded to float16.
        # Horovod's own average divides the sum, which may be too large for a float16 where the mean is not, and its
        # prescale_factor is none on ROCm.
        if self._compressed and sent.dtype is torch.float32:
            sent = (sent * self._share).half()
        elif sent.dtype in _NATIVE:
            sent = sent.contiguous().mul_(self._share)
        else:
            sent = sent.float().mul_(self._share)
        sent = sent.contiguous()
        name = self._names[parameter]
        what = f"averaging of the gradient of {name!r}"
        with self._explained(what):
            handle = self._hvd.allreduce_async_(sent, name=f"gradient.{name}", op=self._hvd.Sum)
        self._messages[parameter] = _Message(handle, what, gradient, sent)

    def finish(self, *, frozen: bool = False) -> None:
        """Average what is not on its way yet, and wait for the end.

        Args:
            frozen: average whatever gradient there is on some rank, those of frozen parameters too.

        Raises:
            DistributedError: parameters lack a gradient, and neither ``finds_unused`` nor ``frozen`` allow it.
            DistributedError, RuntimeError: the other ranks are gone, or didn't send theirs in time.
        """
        agreed = self._finds_unused or frozen
        # what was frozen in an accumulation has gradients from before
        parameters = [one for one in self._names if agreed or one.requires_grad or one.grad is not None]
        kinds = [_kind(parameter) for parameter in parameters]
        if agreed:
            kinds = self._agreed(kinds)
        elif _NO in kinds:
            raise self._explain_unused(
                [self._names[one] for one, kind in zip(parameters, kinds, strict=True) if kind == _NO]
            )
        for parameter, kind in zip(parameters, kinds, strict=True):
            if kind == _DENSE and parameter not in self._messages:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._send(parameter)
        self._wait_for_all()
        if sparse := [one for one, kind in zip(parameters, kinds, strict=True) if kind == _SPARSE]:
            names = ", ".join(repr(self._names[one]) for one in sparse)
            with self._guard(f"averaging of the sparse gradients of {names}"):
                collectives.average_gradients(sparse, frozen=True)

    def _agreed(self, kinds: list[int]) -> list[int]:
        """Return the kind of each parameter's gradient on all ranks together."""
        mine = torch.tensor(kinds, dtype=torch.int32)
        what = "comparison of the gradients that the ranks have"
        with self._explained(what):
            handle = self._hvd.allreduce_async_(mine, name="gradient kinds", op=self._hvd.Max)
        self._wait(handle, what, time.monotonic() + self._timeout)
        return mine.tolist()

    @torch.no_grad()
    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + self._timeout
        messages, self._messages = self._messages, {}
        for message in messages.values():
            self._wait(message.handle, message.what, deadline)
            gradient = message.gradient
            if message.sent.data_ptr() == gradient.data_ptr():
                continue
            back = torch.view_as_complex(message.sent) if gradient.is_complex() else message.sent
            gradient.copy_(back)

    def _wait(self, handle: int, what: str, deadline: float) -> None:
        """Wait as :func:`hvd.synchronize` does, but let signals and the timeout through."""
        hvd, pause = self._hvd, _FIRST_PAUSE
        while not hvd.poll(handle):
            if time.monotonic() > deadline:
                with self._guard(what):
                    raise RuntimeError(f"collective of Horovod timed out after {self._timeout:g} s: {what}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        with self._explained(what):
            hvd.synchronize(handle)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Raise Horovod's bare error as one that says what was averaged, and which rank's failure was the cause."""
        try:
            yield
        except self._hvd.HorovodInternalError as error:
            with self._guard(what):  # in the words by which torchhal knows a consequence of another rank's failure
                raise RuntimeError(f"the process group of Horovod was aborted in the {what}: {error}") from error


def _kind(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return _NO
    return _SPARSE if parameter.grad.is_sparse else _DENSE
