"""Match the capabilities that a precision and a strategy need with those that the other components have."""

from __future__ import annotations

from torchhal import registry
from torchhal.accelerators import Accelerator
from torchhal.capabilities import check_capabilities, describe, missing
from torchhal.errors import ComponentError, UnsupportedCombinationError
from torchhal.precision import Precision
from torchhal.registry._discovery import USER
from torchhal.resolve._plan import ResolvedComponent
from torchhal.strategies import ParallelStrategy, Strategy

_METHODS = tuple(name for name, value in vars(Precision).items() if callable(value) and not name.startswith("_"))


def check_needs(accelerator: ResolvedComponent, strategy: ResolvedComponent) -> None:
    """Raise UnsupportedCombinationError unless the accelerator has what the strategy needs."""
    chosen: Strategy = strategy.value
    needs = check_capabilities(chosen.needs, f"{type(chosen).__name__}.needs")
    if isinstance(chosen, ParallelStrategy) and chosen.process_group_backend:
        needs = frozenset(need for need in needs if not need.startswith("collective:"))
    has = _capabilities(accelerator.value)
    if lacking := missing(needs, has):
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} needs {describe(lacking)}, which accelerator {accelerator.alias!r} doesn't "
            f"have (it has {describe(has)}): use {accelerator.value.default_strategy!r} for one device or "
            f"{accelerator.value.default_parallel_strategy!r} for several, or, where the device or its backend has it, "
            f"declare it in {type(accelerator.value).__name__}.capabilities"
        )


def check_precision(accelerator: ResolvedComponent, strategy: ResolvedComponent, precision: ResolvedComponent) -> None:
    """Raise UnsupportedCombinationError unless accelerator and strategy can compute in the precision."""
    value: Precision = precision.value
    needs = check_capabilities(value.needs, f"{type(value).__name__}.needs")
    _check_accelerator(accelerator, precision, needs)
    if _lists_precisions(strategy.value):
        _check_listed(strategy, precision)
        return
    _check_carried(strategy, precision, needs)
    _check_methods(strategy, precision)


def _capabilities(hardware: Accelerator) -> frozenset[str]:
    return check_capabilities(hardware.capabilities, f"{type(hardware).__name__}.capabilities")


def _check_accelerator(accelerator: ResolvedComponent, precision: ResolvedComponent, needs: frozenset[str]) -> None:
    hardware: Accelerator = accelerator.value
    value: Precision = precision.value
    named = _named_accelerators(value)
    if named is not None:  # takes precedence over what the accelerator declares, as it did before capabilities
        if not named & {accelerator.alias, hardware.name}:
            raise UnsupportedCombinationError(
                f"precision {precision.alias!r} works on accelerator {listed(named)} (got {accelerator.alias!r})"
            )
        return
    has = _capabilities(hardware)
    lacking = missing(needs, has)
    if hardware._lists_precisions:
        names = {precision.alias, value.alias}
        # an accelerator of before capabilities refused no precision that is published under no alias
        if not lacking or hardware.precisions & names or not any(map(_is_published, names)):
            return
        raise UnsupportedCombinationError(
            f"accelerator {accelerator.alias!r} does not compute in precision {precision.alias!r}: it knows "
            f"{listed(frozenset(hardware.precisions))}"
        )
    if lacking:
        raise UnsupportedCombinationError(
            f"precision {precision.alias!r} needs {describe(lacking)}, which accelerator {accelerator.alias!r} doesn't "
            f"have (it has {describe(has)}): use another precision, such as '32-true', or, where the device has it, "
            f"declare it in {type(hardware).__name__}.capabilities"
        )


def _named_accelerators(precision: Precision) -> frozenset[str] | None:
    """Return the accelerators that a precision of before capabilities is bound to, else None."""
    own = vars(precision)
    if "needs" in own or not (type(precision)._names_accelerators or "accelerators" in own):
        return None
    return precision.accelerators


def _lists_precisions(strategy: Strategy) -> bool:
    return (type(strategy)._lists_precisions or "precisions" in vars(strategy)) and strategy.precisions is not None


def _check_listed(strategy: ResolvedComponent, precision: ResolvedComponent) -> None:
    allowed = strategy.value.precisions
    if not allowed & {precision.alias, precision.value.alias}:
        raise UnsupportedCombinationError(
            f"strategy {strategy.alias!r} does not compute in precision {precision.alias!r}: it knows {listed(allowed)}"
        )


def _check_carried(strategy: ResolvedComponent, precision: ResolvedComponent, needs: frozenset[str]) -> None:
    chosen: Strategy = strategy.value
    lacks = check_capabilities(chosen.lacks, f"{type(chosen).__name__}.lacks")
    if refused := needs & lacks:
        raise UnsupportedCombinationError(
            f"precision {precision.alias!r} needs {describe(refused)}, which strategy {strategy.alias!r} can't carry: "
            "use another precision, such as '32-true', or another strategy, such as 'ddp' or 'single_device'"
        )


def _check_methods(strategy: ResolvedComponent, precision: ResolvedComponent) -> None:
    chosen: Strategy = strategy.value
    if chosen.precision_methods is None:
        return
    value: Precision = precision.value
    bases = (Precision, *chosen.implements_precisions)
    never_called = [
        name
        for name in _METHODS
        if name not in chosen.precision_methods
        and (name in vars(value) or all(getattr(type(value), name) is not getattr(base, name) for base in bases))
    ]
    if never_called:
        raise UnsupportedCombinationError(
            f"precision {precision.alias!r} overrides {describe(f'{name}()' for name in never_called)} of "
            f"{type(value).__name__}, which strategy {strategy.alias!r} never calls: it does that work itself, by the "
            "declared param_dtype and compute_dtype. Use a precision that leaves these methods alone, or another "
            "strategy, such as 'ddp' or 'single_device'"
        )


def _is_published(alias: str) -> bool:
    """Return whether core or a plugin publishes a precision of this name; one of the user's own isn't checked."""
    try:
        return registry.find("precision", alias).distribution != USER
    except (LookupError, ComponentError):
        return False


def listed(names: frozenset[str]) -> str:
    """Return names for a message, quoted and sorted."""
    return ", ".join(map(repr, sorted(names)))
