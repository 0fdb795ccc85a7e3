"""List the operators of torch that draw random numbers, and those of which shapes alone determine how many.

Ranks that are seeded alike draw what one process draws only where each of them draws for whole tensors: also for those
of which it has a part, or nothing.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

_BY_SHAPE = (
    "normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "geometric_", "random_", "bernoulli_.float",
    "rand_like", "randn_like", "randint_like", "bernoulli.p", "normal_functional",
)  # fmt: skip
"""Names, or names with an overload, of operators that need nothing of their tensors but shape, dtype and device."""

_BY_VALUE = ("bernoulli", "bernoulli_", "normal", "native_dropout")
"""Those that compute with the values, but draw one number for each element, independent of its value."""

_BY_VALUE_ALONE = ("poisson", "binomial", "_standard_gamma", "multinomial", "rrelu_with_noise")
"""Those that may draw more for one value than for another."""

DROPOUT: Final = torch.ops.aten.native_dropout.default


@functools.cache
def drawing() -> frozenset[Any]:
    """Return the operators that draw and are applied to tensors, of any kind: attention draws too, not by elements."""
    return frozenset(operator for operator in _seeded() if _is_of(operator, _BY_SHAPE + _BY_VALUE + _BY_VALUE_ALONE))


@functools.cache
def is_by_shape(operator: Any) -> bool:
    """Return whether the numbers that ``operator`` draws depend on shapes and numbers alone."""
    return _is_of(operator, _BY_SHAPE) and sum(_takes_tensor(each) for each in operator._schema.arguments) == 1


@functools.cache
def draws_for_each_element(operator: Any) -> bool:
    """Return whether ``operator`` draws a number of values that depends on shapes alone."""
    return _is_of(operator, _BY_SHAPE + _BY_VALUE)


def draws(operator: Any) -> bool:
    """Return whether ``operator`` draws from a generator."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def _is_of(operator: Any, names: tuple[str, ...]) -> bool:
    name = operator._schema.name.partition("::")[2]
    return name in names or f"{name}.{operator._schema.overload_name or 'default'}" in names


def _takes_tensor(argument: Any) -> bool:
    return str(argument.type) == "Tensor"


def _seeded() -> list[Any]:
    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten":
            operator = getattr(getattr(torch.ops.aten, name, None), schema.overload_name or "default", None)
            if operator is not None and draws(operator):
                found.append(operator)
    return found
