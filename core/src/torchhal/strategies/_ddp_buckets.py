"""The order in which DistributedDataParallel's buckets hold gradients: read from a wrapper, put into another.

A ring sums each part of a buffer starting at a different rank, so with three ranks or more the place of a gradient
determines how its sum is rounded. The wrapper chooses the places twice: for its first iteration by the order of the
parameters, and from the second on by that in which the gradients of the first came (``Reducer::rebuild_buckets``). A
run that is resumed has a first iteration that the unbroken one doesn't have.

All names by which this can be done are torch's private ones. Where one is missing, the order is neither saved nor set,
and rank 0 logs that once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_NAMES = (
    "reducer._rebuild_buckets", "reducer._push_all_rebuilt_params", "logger.set_runtime_stats_and_log", "_comm_hooks",
    "_get_ddp_logging_data", "_build_params_for_reducer", "_ddp_init_helper", "_build_debug_param_to_name_mapping",
)  # fmt: skip


def read_bucket_order(wrapper: DistributedDataParallel) -> list[str] | None:
    """Return the parameters' names, bucket by bucket, as the next iteration has them; None before the first.

    Called on every rank, between two iterations.
    """
    if not _has_names(wrapper):
        return None
    with torch.inference_mode(False):  # a save in a validation must not create inference tensors
        wrapper.reducer._rebuild_buckets()  # which the next forward would do, if it is due
    wrapper.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    told = wrapper._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")  # type: ignore[no-untyped-call]
    if not told:
        return None
    names = _names(wrapper)
    return [names[int(index)] for bucket in told.split(",") for index in bucket.split()]


def set_bucket_order(wrapper: DistributedDataParallel, order: Sequence[str]) -> bool:
    """Let a new ``wrapper`` begin with the buckets of one whose :func:`read_bucket_order` was ``order``.

    Called on every rank. Returns whether it does: one over other parameters, or that chooses its buckets otherwise, is
    left as it is.
    """
    if not _has_names(wrapper):
        return False
    names = _names(wrapper)
    if sorted(names) != sorted(order) or not _rebuilds(wrapper):
        return False
    parameters, sparse = wrapper._build_params_for_reducer()  # type: ignore[no-untyped-call]
    places = [names.index(name) for name in order]
    ordered = [parameters[place] for place in places]
    # As unpickling a wrapper does it. The previous reducer is freed, together with its hooks on the parameters.
    wrapper._ddp_init_helper(  # type: ignore[no-untyped-call]
        ordered,
        [sparse[place] for place in places],
        wrapper._build_debug_param_to_name_mapping(ordered),  # type: ignore[no-untyped-call]
        wrapper.static_graph,
    )
    hooks, wrapper._comm_hooks = wrapper._comm_hooks, []
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)
    wrapper.reducer._push_all_rebuilt_params()  # as if the gradients had come in this order
    return bool(wrapper.reducer._rebuild_buckets())


def _has_names(wrapper: DistributedDataParallel) -> bool:
    """Return whether this torch has all names needed to read and set the order; the same on every rank."""
    for name in _NAMES:
        try:
            functools.reduce(getattr, name.split("."), wrapper)
        except AttributeError:
            if dist.get_rank() == 0:
                _warn_once(name)
            return False
    return True


@functools.cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"torch {torch.__version__} has no DistributedDataParallel.{name}, by which checkpoints get and give the order "
        "of its buckets: from three ranks on, a resumed run adds gradients up in another order than the unbroken one, "
        "and rounds them otherwise. Nothing else is lost",
        stacklevel=2,
    )


def _names(wrapper: DistributedDataParallel) -> list[str]:
    """Return names of the parameters that the wrapper averages, in its own order."""
    known = {id(parameter): name for name, parameter in wrapper.module.named_parameters()}
    parameters, _ = wrapper._build_params_for_reducer()  # type: ignore[no-untyped-call]
    return [known[id(parameter)] for parameter in parameters]


def _rebuilds(wrapper: DistributedDataParallel) -> bool:
    """Return whether it rebuilds its buckets after its first iteration, and a new reducer would lose no state."""
    return not (
        wrapper.find_unused_parameters
        or wrapper.static_graph  # whose first iteration records the graph in buckets of its own
        or getattr(wrapper, "mixed_precision", None) is not None
        or getattr(wrapper, "_use_python_reducer", False)
        or getattr(wrapper, "_delay_all_reduce_params", None)
    )
