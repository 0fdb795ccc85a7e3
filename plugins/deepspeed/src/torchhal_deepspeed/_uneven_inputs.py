"""Let ranks without a batch gather the parameters that the others gather in a forward at stage 3."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

_GATHERS: Final = ("all_gather", "all_gather_coalesced")
"""What DeepSpeed makes a parameter whole with; a method of each parameter."""


@contextmanager
def uneven_forward(ranks: Collection[int], engine: Any, broadcast: Callable[[Any, int], Any]) -> Iterator[None]:
    """Wrap a forward without gradients that only ``ranks`` run; the other ranks gather parameters with them.

    The first of these ranks sends which parameters it gathers next: no batch is made up, and nothing of the user's runs
    twice. Every rank enters and leaves with nothing gathered, and DeepSpeed's record of the order of submodules, by
    which it gathers ahead, begins anew: a rank that ran none would have another one.

    Args:
        ranks: those that have a batch.
        engine: of stage 3, on every rank.
        broadcast: gives every rank the object of one.
    """
    module, leader = engine.module, min(ranks)
    coordinator = getattr(engine.optimizer, "parameter_offload", engine.optimizer).get_param_coordinator()
    _release(coordinator, module)
    if engine.global_rank in ranks:
        with _told(coordinator, module, lambda word: broadcast(word, leader)):
            yield
        broadcast(None, leader)  # not after an error: the ranks that wait raise by other means
    else:
        parameters = {parameter.ds_id: parameter for parameter in module.parameters()}
        while (word := broadcast(None, leader)) is not None:
            name, numbers, options = word
            _join(name, [parameters[number] for number in numbers], options)
        yield
    _release(coordinator, module)


def _release(coordinator: Any, module: nn.Module) -> None:
    if coordinator.is_invalid_trace():
        coordinator._clean_inflight_param_registry()
    else:
        coordinator._invalidate_trace()
    coordinator.release_and_reset_all(module)


def _join(name: str, parameters: list[Any], options: dict[str, Any]) -> None:
    """Gather these parameters with the other ranks, and release them at once."""
    handle = getattr(parameters[0], name)(parameters, **options)
    if handle is not None:
        handle.wait()
    parameters[0].partition(parameters)


@contextmanager
def _told(coordinator: Any, module: nn.Module, tell: Callable[[Any], Any]) -> Iterator[None]:
    """Send each gathering before it begins, and remove the traces of a forward that the other ranks lack."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    def telling(parameter: Any, name: str) -> Callable[..., Any]:
        gather = getattr(parameter, name)

        def run(param_list: Any = None, **options: Any) -> Any:
            wanted = [parameter] if param_list is None else list(param_list)
            if missing := [one for one in wanted if one.ds_status is ZeroParamStatus.NOT_AVAILABLE]:
                tell((name, [one.ds_id for one in missing], options))
            return gather(wanted, **options)

        return run

    before = [(parameter, name, getattr(parameter, name)) for parameter in module.parameters() for name in _GATHERS]
    external: list[tuple[Any, dict[int, Any]]] = [
        (owner._external_params, dict(owner._external_params))  # type: ignore[arg-type]
        for owner in module.modules()
        if hasattr(owner, "_external_params")
    ]
    for parameter, name, _ in before:
        setattr(parameter, name, telling(parameter, name))
    vars(coordinator)["reset_step"] = lambda: None  # it compares the ranks' records
    try:
        yield
    finally:
        del vars(coordinator)["reset_step"]
        for parameter, name, gather in before:
            setattr(parameter, name, gather)
        for now, known in external:  # what a submodule took from another one
            for key in now.keys() - known.keys():
                now.pop(key).is_external_param = False
