"""Try on small copies of an optimizer whether it treats each parameter by itself, and draws no random numbers."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchhal import rng
from torchhal.accelerators import Accelerator
from torchhal.errors import ConfigurationError, TorchhalError

_STEPS = 12
"""How many steps an optimizer is tried with at first: some depend on all parameters from their second step on."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

MOST_STEPS = 256
"""How many steps are tried in all, while as many are done."""

_LEAST_RATE = 1e-2


def check_separable(
    optimizer: Optimizer, alias: str, accelerator: Accelerator, device: torch.device
) -> OptimizerTrial | None:
    """Refuse an optimizer whose step on one parameter depends on others, or that draws random numbers.

    It may depend on them by a global norm or by how many there are. A copy of it is tried on tensors of a few elements,
    as there is no other way to detect it. Those of torch need no trial: all but LBFGS treat each parameter by itself.
    Returns the object that tries later steps (:meth:`OptimizerTrial.before_step`).
    """
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return None
    trial = OptimizerTrial(optimizer, alias, accelerator, device)
    trial.run(steps_due(0, 0))
    return trial


def steps_due(done: int, tried: int) -> int:
    """Return how many steps are to be tried now: at set-up some, later twice as many as are done, mostly none.

    Some optimizers begin to look at all parameters, or at whole ones, after a warm-up.

    Args:
        done: the number of the optimizer's step that comes; 0 at set-up.
        tried: the number of steps that were tried.

    .. versionadded:: 0.2
    """
    if done == 0:
        return _STEPS
    is_power_of_two = done & (done - 1) == 0
    return min(2 * done, MOST_STEPS) - tried if is_power_of_two and tried < min(2 * done, MOST_STEPS) else 0


class OptimizerTrial:
    """Copies of an optimizer with small parameters: of every second one gradients differ, or it is missing."""

    def __init__(self, optimizer: Optimizer, alias: str, accelerator: Accelerator, device: torch.device) -> None:
        self.name = type(optimizer).__name__
        self.alias = alias
        self.accelerator = accelerator
        self.device = device
        self.tried = self.done = 0
        self.has_failed = False
        """Whether a copy has failed, as one does that keeps a list of buffers beside its groups."""
        self._copies: list[_SmallCopy] = []
        state = rng.collect(accelerator, device)
        try:
            for loud, divided in ((False, False), (True, False), (False, True)):
                torch.manual_seed(0)
                self._copies.append(_SmallCopy(optimizer, loud, accelerator, device, divided))
        except Exception as error:
            self._give_up(error)
        finally:
            rng.restore(state, accelerator, device)

    def before_step(self) -> None:
        """Try further steps where :func:`steps_due` says so."""
        self.done += 1
        if steps := steps_due(self.done, self.tried):
            self.run(steps)

    def run(self, steps: int) -> None:
        """Let each take ``steps`` more; raise ConfigurationError if what they train has become another."""
        if not self._copies:
            return
        state = rng.collect(self.accelerator, self.device)
        quiet, loud, *divided = self._copies
        try:
            for each in self._copies:
                torch.manual_seed(1 + self.tried)
                each.run(steps)
        except Exception as error:
            if divided and each is divided[0]:  # one that can't do without the others, perhaps with an empty group
                self._copies = [quiet, loud]
                self.has_failed = True
            else:
                self._give_up(error)
                return
        finally:
            rng.restore(state, self.accelerator, self.device)
        self.tried += steps
        part = self._copies[2] if len(self._copies) > 2 else None
        if any(each.drew for each in self._copies):
            raise self._drawing()
        if not _same(quiet, loud):
            why = "the gradient of one changes its step on others, as by the norm of all gradients"
        elif part and not _same(quiet, part):
            why = "without some of them its step on the others changes, as by how many there are"
        else:
            return
        raise ConfigurationError(
            f"strategy {self.alias!r} divides the parameters among the ranks, and {self.name} looks at all of them "
            f"together: {why}. Use another optimizer, with Trainer(gradient_clip_val=...) if it is to clip, or "
            "strategy='ddp'"
        )

    @contextmanager
    def watched(self, optimizer: Optimizer, step: int) -> Iterator[None]:
        """Refuse an optimizer that draws inside, in steps that are a power of two: it may begin to after all trials.

        What a hook of its step draws can't be distinguished from that, so an optimizer with such hooks isn't checked.
        """
        if step & (step - 1) or any(getattr(optimizer, name, None) for name in STEP_HOOKS):
            with self.explained():
                yield
            return
        before = self._generators()
        with self.explained():
            yield
        if not all(map(torch.equal, before, self._generators())):
            raise self._drawing()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what an error inside means where the optimizer can't do without some of its parameters."""
        try:
            yield
        except (RuntimeError, ValueError, IndexError, KeyError, AssertionError, TypeError) as error:
            if not self.has_failed or isinstance(error, TorchhalError):
                raise
            raise ConfigurationError(
                f"{self.name} failed in its step ({type(error).__name__}: {error}), and strategy {self.alias!r} lets "
                "each rank step some of the parameters alone, perhaps none of a group: if it keeps something for each "
                "of them in a list beside its groups, keep it in self.state[parameter], or use strategy='ddp'"
            ) from error

    def _generators(self) -> list[torch.Tensor]:
        """States of torch's generators of the host and the device."""
        return _generators(self.accelerator, self.device)

    def _drawing(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self.name} draws random numbers in its step, and strategy {self.alias!r} lets each rank step parameters "
            "of its own: ranks that are seeded alike would draw the same for different parameters. Use strategy='ddp' "
            "or 'zero3', or add the noise to gradients in on_before_optimizer_step"
        )

    def _give_up(self, error: Exception) -> None:
        self.has_failed = True
        self._copies = []
        warnings.warn(
            f"whether {self.name} treats each parameter by itself could not be tried ({type(error).__name__}: {error}):"
            f" if it looks at all of them together, by the norm of all gradients, say, strategy {self.alias!r} steps "
            "otherwise than one process",
            stacklevel=2,
        )


class OptimizerTrials:
    """The trials of a strategy's optimizers, those of torch left out, which need none."""

    def __init__(self) -> None:
        self._trials: dict[int, OptimizerTrial | None] = {}

    def add(self, optimizer: Optimizer, alias: str, accelerator: Accelerator, device: torch.device) -> None:
        """Try ``optimizer`` as :func:`check_separable` does, and keep what tries its later steps."""
        self._trials[id(optimizer)] = check_separable(optimizer, alias, accelerator, device)

    def before_step(self, optimizer: Optimizer, *, with_closure: bool = False) -> AbstractContextManager[None]:
        """Try further steps of ``optimizer`` when they are due, and return a context for its own step.

        Args:
            optimizer: the one that is about to step.
            with_closure: its step runs a training step, which may draw random numbers, and so is not checked for that.
        """
        trial = self._trials.get(id(optimizer))
        if trial is None:
            return nullcontext()
        trial.before_step()
        return nullcontext() if with_closure else trial.watched(optimizer, trial.done)


class _SmallCopy:
    """An optimizer over small parameters.

    How large gradients are is another in each step, over some orders of magnitude: some optimizers look at all
    parameters only where a norm is below a threshold, or above one.

    Args:
        loud: every second parameter has gradients as large as their dtype can have without an overflow of squares.
        divided: it has none of these parameters.
    """

    def __init__(
        self, optimizer: Optimizer, loud: bool, accelerator: Accelerator, device: torch.device, divided: bool
    ) -> None:
        small = {
            parameter: _small_parameter(parameter, device)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self.optimizer = copy_optimizer(optimizer, small)
        self.parameters = list(small.values())
        self.loud = loud
        self.accelerator = accelerator
        self.device = device
        self.drew = False
        """Whether a step has drawn random numbers from torch's generator of the host or the device."""
        if divided:
            kept = set(self.parameters[::2])
            for group in self.optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if parameter in kept]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            size = float(torch.rand(()))
            for index, parameter in enumerate(self.parameters):
                is_float16 = parameter.dtype is torch.float16
                drawn = 10 ** (2 * size - 2 if is_float16 else 5 * size - 4)
                largest = 1e2 if is_float16 else 1e6
                scale = largest if index % 2 and self.loud else drawn
                gradient = torch.randn(parameter.shape, dtype=parameter.dtype) * scale
                parameter.grad = gradient.to(self.device)
            before = _generators(self.accelerator, self.device)
            step_copy(self.optimizer)
            self.drew = self.drew or not all(map(torch.equal, before, _generators(self.accelerator, self.device)))

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().nan_to_num() for parameter in self.parameters]


def _generators(accelerator: Accelerator, device: torch.device) -> list[torch.Tensor]:
    host = torch.get_rng_state()
    return [host] if device.type == "cpu" else [host, torch.as_tensor(accelerator.get_rng_state(device))]


def _same(one: _SmallCopy, other: _SmallCopy) -> bool:
    """Return whether the parameters that every copy trains alike are equal: the first, the third and so on."""
    return all(map(torch.equal, one.values()[::2], other.values()[::2]))


def _small_parameter(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    values = torch.randn([min(size, 3) for size in parameter.shape], dtype=parameter.dtype)
    small_parameter = torch.nn.Parameter(values.to(device), requires_grad=parameter.requires_grad)
    vars(small_parameter).update(vars(parameter))  # what users mark their parameters with
    return small_parameter


def copy_optimizer(
    optimizer: Optimizer,
    parameters: Mapping[torch.Tensor, torch.Tensor],
    has_elements: Callable[[Any, str, torch.Tensor], bool] | None = None,
) -> Optimizer:
    """Return a copy of ``optimizer`` over other parameters, to try on it what steps do.

    It shares nothing with the original: neither weights, gradients and state nor what it keeps beside them, another
    optimizer that it wraps included. It has no hooks, which may change what isn't copied. A learning rate of less than
    0.01 is 0.01 in the copy: a warm-up begins with zero, with which no two steps would differ.

    Args:
        optimizer: the user's.
        parameters: the copy's parameter for each of the original's.
        has_elements: called with a value of a parameter's state, its name and the original parameter; True if the value
            has a number for each element. By default one of the parameter's shape does, where that has a dimension.

    .. versionadded:: 0.2
    """
    memo: dict[int, Any] = {id(parameter): other for parameter, other in parameters.items()}
    copied = _copied(optimizer, parameters, has_elements or _has_shape_of, memo)
    for group in copied.param_groups:
        if "lr" in group and abs(float(group["lr"])) < _LEAST_RATE:
            is_tensor = isinstance(group["lr"], torch.Tensor)
            group["lr"] = torch.full_like(group["lr"], _LEAST_RATE) if is_tensor else _LEAST_RATE
    return copied


def step_copy(optimizer: Optimizer) -> None:
    """Let what :func:`copy_optimizer` has returned step, without the hooks that are registered for all optimizers.

    .. versionadded:: 0.2
    """
    with without_step_hooks():
        optimizer.step()


@contextmanager
def without_step_hooks() -> Iterator[None]:
    """Leave out the hooks that are registered for all optimizers inside."""
    registered: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    kept = [(hooks, dict(hooks)) for hooks in registered]
    for hooks, _ in kept:  # emptied, as a step may have been wrapped more than once
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def _copied(
    optimizer: Optimizer,
    parameters: Mapping[torch.Tensor, torch.Tensor],
    has_elements: Callable[[Any, str, torch.Tensor], bool],
    memo: dict[int, Any],
) -> Optimizer:
    copied: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = copied
    for value in vars(optimizer).values():
        for wrapped in _optimizers_in(value):  # of one, deepcopy would omit what torch's state lacks
            if id(wrapped) not in memo:
                _copied(wrapped, parameters, has_elements, memo)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_"):
            copied.__dict__[name] = OrderedDict()
        elif name == "state" and isinstance(value, dict):
            copied.__dict__[name] = _copied_state(value, parameters, has_elements, memo)
        elif name not in ("step", "zero_grad"):  # a scheduler and others put their own on the object
            copied.__dict__[name] = copy.deepcopy(value, memo)
    return copied


def _optimizers_in(value: Any) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, list | tuple | set):
        yield from (each for each in value if isinstance(each, Optimizer))
    elif isinstance(value, dict):
        yield from (each for each in value.values() if isinstance(each, Optimizer))


def _copied_state(
    state: dict[Any, Any],
    parameters: Mapping[torch.Tensor, torch.Tensor],
    has_elements: Callable[[Any, str, torch.Tensor], bool],
    memo: dict[int, Any],
) -> dict[Any, Any]:
    if id(state) in memo:  # of one that shares it with an optimizer that it wraps
        found: dict[Any, Any] = memo[id(state)]
        return found
    copied: dict[Any, Any] = defaultdict(dict)
    memo[id(state)] = copied
    for key, entry in state.items():
        parameter = parameters.get(key) if isinstance(key, torch.Tensor) else None
        if parameter is None or not isinstance(entry, dict):
            copied[copy.deepcopy(key, memo)] = copy.deepcopy(entry, memo)
            continue
        copied[parameter] = {
            name: torch.full_like(parameter, 0.1, dtype=value.dtype, requires_grad=False)
            if has_elements(value, name, key)
            else copy.deepcopy(value, memo)
            for name, value in entry.items()
        }
    return copied


def _has_shape_of(value: Any, _name: str, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0
