"""Compare which parameters have gradients, then let Colossal-AI average them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchhal.distributed import collectives
from torchhal.errors import ModelError

_NO, _DENSE, _SPARSE = 0, 1, 2


class GradientReducer:
    """Averages the gradients of a strategy's module over all ranks, when backward has ended.

    Colossal-AI joins gradients in the order in which they come, and doesn't compare what others have: with another
    parameter on another rank, it adds up what doesn't belong together, without an error.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        assert strategy.module is not None
        self._module: nn.Module = strategy.module
        self._trained = self._requires_grad()
        self._cleared: list[Any] = []
        if strategy.stage == 2:
            self._watch_clearing()

    def _watch_clearing(self) -> None:
        """Clear gradients in Colossal-AI's store, too, when somebody clears those of a module or an optimizer."""
        for cleared in (self._module, *self._strategy.engines):
            vars(cleared)["zero_grad"] = _Clearing(self._strategy, cleared, vars(cleared).get("zero_grad"))
            self._cleared.append(cleared)

    def release(self) -> None:
        """Take the watched ``zero_grad`` away."""
        for cleared in self._cleared:
            if isinstance(watching := vars(cleared).get("zero_grad"), _Clearing):
                del vars(cleared)["zero_grad"]
                if watching.before is not None:
                    vars(cleared)["zero_grad"] = watching.before
        self._cleared = []

    def _requires_grad(self) -> dict[nn.Parameter, bool]:
        return {parameter: parameter.requires_grad for parameter in self._module.parameters()}

    def reduce(self, *, frozen: bool = False) -> None:
        """Average the gradients.

        Args:
            frozen: average whatever gradient there is on some rank, those of frozen parameters too.

        Raises:
            DistributedError: parameters lack a gradient, and neither ``find_unused_parameters`` nor ``frozen`` allows
                it.
            ModelError: a gradient is sparse.
        """
        strategy = self._strategy
        strategy.follow_parameters()
        newly_frozen = self._compare_trained()
        if newly_frozen and not frozen:  # with what an accumulation has given them, on this rank or on others
            self._send(newly_frozen, self._agreed([_kind(parameter) for parameter in newly_frozen]))
        ignored = strategy.parameters_to_ignore()
        names = {parameter: name for name, parameter in self._module.named_parameters() if name not in ignored}
        parameters = [each for each in names if frozen or each.requires_grad]
        kinds = [_kind(parameter) for parameter in parameters]
        if frozen or strategy.find_unused_parameters:
            kinds = self._agreed(kinds)
        elif _NO in kinds:
            lacking = [names[each] for each, kind in zip(parameters, kinds, strict=True) if kind == _NO]
            raise strategy.explain_unused(lacking)
        self._send(parameters, kinds)

    def _send(self, parameters: list[nn.Parameter], kinds: list[int]) -> None:
        """Average the gradients of those parameters that have one on some rank."""
        if _SPARSE in kinds:
            names = {parameter: name for name, parameter in self._module.named_parameters()}
            raise ModelError(
                f"the gradient of {names[parameters[kinds.index(_SPARSE)]]!r} is a sparse tensor, and Colossal-AI's "
                "ZeRO divides dense ones: use strategy='ddp' or 'colossalai'"
            )
        found = [each for each, kind in zip(parameters, kinds, strict=True) if kind != _NO]
        engines = self._strategy.engines.values()
        owner = {id(each): engine for engine in engines for each in engine.parameters}
        for engine in engines:
            if own := [each for each in found if owner.get(id(each)) is engine]:
                engine.reduce(list(own))
        if rest := [each for each in found if id(each) not in owner]:  # of no optimizer
            collectives.average_gradients(rest, frozen=True)

    def _agreed(self, kinds: list[int]) -> list[int]:
        """Return the kind of each parameter's gradient on all ranks together."""
        mine = torch.tensor(kinds, dtype=torch.int32, device=collectives.host(self._strategy.root_device))
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return [int(kind) for kind in mine.tolist()]

    def _compare_trained(self) -> list[nn.Parameter]:
        """Compare with the other ranks what is trained, where that has changed; return what was frozen."""
        now = self._requires_grad()
        if now == self._trained:
            return []
        changed = [each for each, trained in now.items() if self._trained.get(each) is not trained]
        self._trained = now
        self._strategy.check_same_trained(changed)
        ignored = set(self._strategy.parameters_to_ignore())
        own = {each for name, each in self._module.named_parameters() if name in ignored}
        return [each for each in changed if not each.requires_grad and each not in own]

    def check_unscaled(self, unscaled: set[int]) -> None:
        """Raise ModelError where a backward would add scaled gradients to unscaled ones that are in store."""
        for optimizer, engine in self._strategy.engines.items():
            if id(optimizer) in unscaled and any(map(engine.has_gradient, engine.parameters)):
                raise ModelError(
                    f"backward() would add scaled gradients to those of {type(optimizer).__name__} that were unscaled "
                    "already: unscale or clip after the last backward() of a step, and clear the gradients of a step "
                    "that is left out with zero_grad()"
                )


class _Clearing:
    """``zero_grad`` of a module or an optimizer; a copy of either has its own again.

    Args:
        strategy: whose engines are cleared, too.
        cleared: the module or the optimizer.
        before: what stood on the object in its place.
    """

    def __init__(self, strategy: Any, cleared: Any, before: Callable[..., Any] | None) -> None:
        self.before = before
        self._strategy = strategy
        self._cleared = cleared
        self._own: Callable[..., Any] = cleared.zero_grad

    def __reduce__(self) -> tuple[Any, ...]:
        # a copied bound method of the object belongs to the copy of that
        return (_same_value, (self.before,)) if self.before is not None else (_zero_grad_of, (self._cleared,))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._own(*args, **kwargs)
        for optimizer, engine in self._strategy.engines.items():
            if self._cleared is optimizer or self._cleared is self._strategy.module:
                engine.zero_grad()


def _zero_grad_of(cleared: Any) -> Callable[..., Any]:
    own: Callable[..., Any] = type(cleared).zero_grad.__get__(cleared)
    return own


def _same_value(value: Any) -> Any:
    return value


def _kind(parameter: nn.Parameter) -> int:
    if parameter.grad is None:
        return _NO
    return _SPARSE if parameter.grad.is_sparse else _DENSE
