"""Capture the arguments with which a step calls its model, by running it up to that call, and override the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchhal import rng
from torchhal.errors import ModelError
from torchhal.trainer.logging import is_metric
from torchhal_parallel._module_restore import ForwardOverride

CHECKED_CAPTURES = 2
"""How many captures of a step are repeated, to compare what each leaves behind."""


class _ForwardReached(BaseException):
    """The step has called the model; what with. No Exception, which the step might catch."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


class PatchedForward(ForwardOverride):
    """The forward of a model that no rank has whole: it gives what a pipeline has computed, while a step runs."""

    override: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.override is None:
            name = type(self.module).__name__
            raise ModelError(
                f"{name} was called outside of its steps: under a pipeline each rank has a part of it, and all of them "
                "run theirs together only in training_step, validation_step, test_step and predict_step. Call it "
                "there, and keep what a hook or a callback needs of the result"
            )
        return self.override(*args, **kwargs)


class ForwardCapture:
    """Runs a step as far as ``self(...)``: ``capture(step, batch, rest)`` gives the arguments of the call by name.

    What a step does before the call, it does again when it runs in earnest. So that must leave nothing behind but what
    a second run leaves alike, and draw no random numbers, which would be others then, and others on each rank. The
    generators are compared each time; what the step leaves, in the first :data:`CHECKED_CAPTURES` captures, which are
    repeated.

    Raises:
        ModelError: the step fails before the call or never makes it, or does what can't be done twice.
    """

    def __init__(self, module: nn.Module, strategy: Any) -> None:
        self.module = module
        self.strategy = strategy
        self.signature = inspect.signature(type(module).forward)
        parameters = self.signature.parameters.values()
        self.further = next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), None)
        """What the forward calls the keyword arguments that it has no names for."""
        self._captures: dict[str, int] = {}
        self._forward = PatchedForward(module)

    @contextmanager
    def overridden(self, override: Callable[..., Any]) -> Iterator[None]:
        """Let ``module(...)`` call ``override`` inside."""
        before, self._forward.override = self._forward.override, override
        try:
            yield
        finally:
            self._forward.override = before

    def __call__(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...]) -> dict[str, Any]:
        name = getattr(step, "__name__", "step")
        captures = self._captures.get(name, 0)
        generators = self.generators()
        if captures < CHECKED_CAPTURES:
            self._captures[name] = captures + 1
            self._run(step, batch, rest)
            state = _state_of(self.module)
            arguments = self._run(step, batch, rest)
            self._check_state(name, state)
        else:
            arguments = self._run(step, batch, rest)
        self._check_generators(name, generators)
        return arguments

    def _run(self, step: Callable[..., Any], batch: Any, rest: tuple[Any, ...]) -> dict[str, Any]:
        model = type(self.module).__name__

        def stop(*args: Any, **kwargs: Any) -> Any:
            raise _ForwardReached(self.named(args, kwargs))

        with without_logging(self.module), self.overridden(stop), torch.no_grad():
            try:
                step(batch, *rest)
            except _ForwardReached as called:
                return called.arguments
            except Exception as error:
                raise ModelError(
                    f"the step of {model} failed before it called self(...) ({type(error).__name__}: {error}): under a "
                    "pipeline a rank has only its part of the model, which self(...) alone may use"
                ) from error
        raise ModelError(
            f"the step of {model} does not call self(...): a pipeline runs the model's forward, and the step must make "
            "the loss from what it returns, as a rank has only its part of the model"
        )

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the model by name."""
        bound = self.signature.bind(self.module, *args, **kwargs).arguments
        named = dict(list(bound.items())[1:])
        if self.further is not None:
            named |= named.pop(self.further, {})
        return named

    def generators(self) -> dict[str, Any]:
        """Return the state of all generators."""
        return rng.collect(self.strategy.accelerator, self.strategy.root_device)

    def drawn_from(self, generators: Mapping[str, Any]) -> list[str]:
        """Return the names of the generators that have moved since they were in that state."""
        return rng.drawn_between(generators, self.generators())

    def _check_generators(self, name: str, generators: Mapping[str, Any]) -> None:
        if moved := self.drawn_from(generators):
            raise ModelError(
                f"{name} of {type(self.module).__name__} draws random numbers ({moved[0]}) before it calls self(...): "
                "under a pipeline they would be others for the stages than for the loss. Draw them in forward, which "
                "may return what the loss needs of them, or make them part of the batch in the data set"
            )

    def _check_state(self, name: str, state: Mapping[str, Any]) -> None:
        after = _state_of(self.module)
        if changed := [key for key in state if key in after and not _same(state[key], after[key])]:
            raise ModelError(
                f"{name} of {type(self.module).__name__} changes {changed[0]!r} before it calls self(...), which a "
                "pipeline runs twice to learn what self is called with: change it after self(...), where a step runs "
                "once for each microbatch, or in on_train_batch_start"
            )


def returns_once(module: nn.Module, output: Any) -> Callable[..., Any]:
    """Return a function that gives ``output``, for ``module(...)``, and raises ModelError when it is called again."""
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise ModelError(
                f"the step of {type(module).__name__} calls self(...) more than once, and a pipeline runs the forward "
                "once per step"
            )
        return output

    return forward


@contextmanager
def without_logging(module: nn.Module) -> Iterator[None]:
    """Drop what the step logs inside: it logs again when it runs in earnest."""
    with logging_by(module, lambda *args, **kwargs: None):
        yield


@contextmanager
def logging_by(module: nn.Module, log: Callable[..., None]) -> Iterator[None]:
    """Let ``module.log`` and ``module.log_dict`` be ``log`` inside."""
    names = [name for name in ("log", "log_dict") if hasattr(type(module), name) and name not in module.__dict__]
    for name in names:
        module.__dict__[name] = log
    try:
        yield
    finally:
        for name in names:
            module.__dict__.pop(name, None)


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes and buffers of the module and its submodules, and the attributes of metric objects."""
    found: dict[str, Any] = {}
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, value in (*owner._buffers.items(), *vars(owner).items()):
            if name.startswith("_"):
                continue
            found[f"{prefix}{name}"] = _trace(value)
            if is_metric(value) and not isinstance(value, nn.Module):
                found |= {f"{prefix}{name}.{key}": _trace(item) for key, item in vars(value).items()}
    return found


def _trace(value: Any) -> Any:
    """Return what is compared of ``value``, apart from it: its elements, its number or its length, else its type."""
    if isinstance(value, torch.Tensor):
        return value.shape if value.is_meta or value.layout is not torch.strided else value.detach().clone()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return len(value) if isinstance(value, Sequence | Mapping | Set) else type(value)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right.to(left.device)) if left.shape == right.shape else False
    return bool(left == right) if type(left) is type(right) else False
