"""Continue a run exactly: its generators, its position in the data, and both with another number of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from torchhal import rng
from torchhal.errors import ConfigurationError
from torchhal.precision.base import needs_closure
from torchhal.trainer.data._samplers import seed_host

if TYPE_CHECKING:
    from torchhal.trainer.data._training_data import TrainingData
    from torchhal.trainer.run_state import RunState


def data_parallel_rank(run: RunState) -> tuple[int, int]:
    """Return the number of replicas and this one's index; ranks that share the batches of one model count as one."""
    kwargs: Mapping[str, int] | None = run.strategy.distributed_sampler_kwargs
    return (1, 0) if kwargs is None else (kwargs["num_replicas"], kwargs["rank"])


def record_batch_setup(run: RunState, checkpoint: Mapping[str, Any] | None) -> None:
    """Record the samples per optimizer step of the continued run, before the strategy prepares a fit."""
    fit = run.progress
    fit.asked_accumulate = fit.accumulate = run.accumulate_grad_batches
    fit.counters_before = {} if checkpoint is None else checkpoint.get("loops", {}).get("fit", {})


def choose_accumulation(run: RunState, data: TrainingData) -> None:
    """Keep the samples per optimizer step, over all replicas, that the run began with, or nearly so.

    A learning rate belongs to a global batch size. So that is kept, by ``accumulate_grad_batches``, where possible;
    else the nearest is taken, the larger of two. The script takes precedence: if it sets another accumulation or batch
    size than the previous run, as one that divides a global batch itself, those are used.
    """
    fit, asked = run.progress, run.progress.asked_accumulate
    fit.batch_size = data.items_per_batch
    one = data_parallel_rank(run)[0] * fit.batch_size
    fit.step_size = asked * one * run.planned_batches
    if run.planned_batches > 1:
        _accumulate(run, asked * run.planned_batches)
    if (fit.counters_before.get("asked_accumulate"), fit.counters_before.get("batch_size")) == (asked, fit.batch_size):
        fit.step_size = fit.counters_before["step_size"]
        owned = {"owns_accumulation", "owns_step"} & set(run.strategy.features)
        by_itself = getattr(run.module, "automatic_optimization", True) and len(run.strategy.optimizers) < 2
        if by_itself and not owned:
            batches = max(1, int(fit.step_size / one + 0.5))
            try:
                run.strategy.check_accumulation(batches)
            except ConfigurationError:
                batches = asked
            _accumulate(run, batches)


def change_accumulation(run: RunState) -> None:
    """Take the ``accumulate_grad_batches`` that a hook has set, between two optimizer steps.

    The script's own value stays recorded, so that a run continuing from here keeps the size of a step.
    """
    fit = run.progress
    _accumulate(run, run.accumulate_grad_batches * run.planned_batches)
    fit.step_size = fit.accumulate * data_parallel_rank(run)[0] * fit.batch_size


def _accumulate(run: RunState, batches: int) -> None:
    run.progress.accumulate = batches
    run.strategy.accumulate_grad_batches = batches
    vars(run)["accumulate_grad_batches"] = batches  # set without the check for users' changes


def _settle_accumulation(run: RunState) -> str:
    """Set the accumulation once the optimizers exist; return a description of the change, "" for none."""
    fit = run.progress
    if any(map(needs_closure, run.strategy.optimizers)):  # they evaluate a batch several times within one step
        _accumulate(run, fit.asked_accumulate)
    now, before = fit.accumulate * data_parallel_rank(run)[0] * fit.batch_size, fit.counters_before.get("step_size")
    if before is not None and now != before:
        return (
            f"An optimizer step takes {now} {_items(fit)}, not {before} as before "
            f"(accumulate_grad_batches={fit.accumulate}); the learning rate is left alone. "
        )
    if fit.accumulate != fit.asked_accumulate * run.planned_batches:
        return f"accumulate_grad_batches={fit.accumulate} keeps what an optimizer step takes as it was. "
    return ""


def restore_rank(run: RunState, checkpoint: Mapping[str, Any], path: str) -> None:
    """Restore this rank's generators and data position, for any number of replicas in ``checkpoint``."""
    strategy, fit, ranks = run.strategy, run.progress, checkpoint["ranks"]
    mine = data_parallel_rank(run)
    shares = _shares(ranks)
    changed = _settle_accumulation(run)
    # a rank that had this share of the data; this very rank, if it was one of them
    same = len(ranks) == strategy.world_size and shares[strategy.global_rank] == mine
    entry = ranks[strategy.global_rank if same else shares.index(mine) if mine in shares else 0]
    others = _other_data(run, entry)
    if _has_same_batches(run, checkpoint):
        if fit.batches_done and fit.data is not None and entry["data"] is not None:
            fit.data.restore_order(entry["data"])
        fit.resume(entry["data"], entry["rng"])
        if others:
            where = f"The epoch goes on at batch {fit.batches_done}, in the order of now. " if fit.batches_done else ""
            run.warn_once(f"{path!r} is continued with other data. {others}{where}{changed}".rstrip())
        return
    position = None if fit.batches_done else entry["data"]
    where = "The next epoch is shared out among all"
    if fit.batches_done:
        used = _used(checkpoint)
        if used is not None and fit.data is not None and fit.data.order is not None:
            position = _rest(run, entry, used)
            where = f"The epoch goes on after its first {used} {_items(fit)}, at batch {fit.batches_done}"
        else:
            _nearest_batch(run, entry)
            position = entry["data"] if mine in shares or strategy.global_rank == 0 else None
            where = f"The epoch goes on at batch {fit.batches_done}, though the samples before it may be others"
    fit.resume(position, _generators(ranks, strategy.global_rank))
    if mine in shares:
        begin = f"{path!r} is continued with other data"
    else:
        begin = (
            f"{path!r} was written by {_world(shares[0][0], len(ranks))} and is continued by "
            f"{_world(mine[0], strategy.world_size)}"
        )
    run.warn_once(
        f"{begin}. {others}{where}. {changed}Random numbers, of dropout say, are others than they would have been"
    )


def _has_same_batches(run: RunState, checkpoint: Mapping[str, Any]) -> bool:
    """Return whether this rank has the share of a former one, and batches of the same size within an epoch."""
    fit = run.progress
    resized = fit.batches_done > 0 and fit.counters_before.get("batch_size", fit.batch_size) != fit.batch_size
    return data_parallel_rank(run) in _shares(checkpoint["ranks"]) and not resized


def _other_data(run: RunState, entry: Mapping[str, Any]) -> str:
    """Return the differences from when the rank of ``entry`` saved, in sentences; "" for none."""
    fit, position = run.progress, entry["data"] or {}
    before = fit.counters_before.get("batch_size", fit.batch_size)
    said = "" if before == fit.batch_size else f"A batch has {fit.batch_size} sample(s), not {before} as before. "
    if fit.data is None:
        return said
    counts = [("samples", position.get("samples"), fit.data.samples)]
    if not said and data_parallel_rank(run) == tuple(entry.get("share", ())):  # else the samples differ anyhow
        counts.append(("batches", position.get("length"), fit.data.whole_loader_length))
    for what, then, now in counts:
        if then is not None and now is not None and then != now:
            return f"{said}The training data has {now} {what}, not {then} as before. "
    return said


def _items(fit: Any) -> str:
    return "samples" if fit.batch_size > 1 else "batches of the loader"


def carries_accumulated_grads(run: RunState, checkpoint: Mapping[str, Any]) -> bool:
    """Return whether an accumulation that was under way at the save is continued.

    With another number of replicas or another batch size it is restarted.
    """
    return _has_same_batches(run, checkpoint)


def _shares(ranks: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [tuple(entry.get("share", (len(ranks), rank))) for rank, entry in enumerate(ranks)]


def _used(checkpoint: Mapping[str, Any]) -> int | None:
    """Return how many items of the epoch optimizer steps have used; None where the order is unknown."""
    ranks, fit = checkpoint["ranks"], checkpoint["loops"]["fit"]
    order = (ranks[0]["data"] or {}).get("order")
    if order is None:
        return None
    done: int = fit["batches_done"]
    if checkpoint.get("gradients") is not None:
        done -= done % fit["accumulate"]
    used: int = order["start"] + (done - order["batches"]) * _shares(ranks)[0][0] * order["per_batch"]
    return used


def _rest(run: RunState, entry: dict[str, Any], used: int) -> dict[str, Any]:
    """Give the epoch what is left after ``used`` items; return the position at its beginning."""
    fit = run.progress
    data = fit.data
    assert data is not None
    # Steps end at multiples of the accumulation, so the count of batches continues at one: where a step takes what it
    # took before, that is exact.
    step = data_parallel_rank(run)[0] * data.items_per_batch * fit.accumulate
    fit.batches_done = -(-used // step) * fit.accumulate
    order = {**data.remaining_after(entry["data"], used), "batches": fit.batches_done}
    data.resume_remaining(order)
    states = entry["data"]["generators"]
    return {"epoch_rng": None, "generators_at_start": states, "generators": states, "order": order}


def _nearest_batch(run: RunState, entry: dict[str, Any]) -> None:
    fit = run.progress
    replicas, _ = data_parallel_rank(run)
    before, now = entry.get("batch_size"), batch_size(fit)
    samples = fit.batches_done * entry["share"][0] * (before if before and now else 1)
    step = fit.accumulate * replicas * (now if before and now else 1)
    fit.batches_done = samples // step * fit.accumulate


def batch_size(fit: Any) -> int | None:
    """Return the samples per batch and replica, if the training loader provides it; else None."""
    size = getattr(fit.data.loader, "batch_size", None) if fit.data is not None else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _generators(ranks: list[dict[str, Any]], rank: int) -> dict[str, Any]:
    """Return the generator states of a rank: its own saved ones, or new ones derived from a former rank's."""
    state: dict[str, Any] = ranks[rank % len(ranks)]["rng"]
    if rank < len(ranks):
        return state
    callers = rng.collect_host()
    try:
        rng.restore_host(state)
        seed_host(int(torch.randint(2**62, ())) + rank)
        return rng.collect_host()
    finally:
        rng.restore_host(callers)


def entries_of_replicas(run: RunState, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an entry for each rank of a checkpoint, made from this rank's ``entry`` where the others can't be asked.

    Each replica gets its own share of the same data, and random numbers derived from this rank's.
    """
    own, count = run.strategy.global_rank, run.world_size
    replicas, _ = data_parallel_rank(run)
    position = entry["data"]
    entries = []
    for rank in range(count):
        # The state of a loader with a state of its own is this rank's.
        data = position if rank == own or position is None or "loader" not in position else None
        share = [replicas, rank] if replicas == count else list(entry["share"])
        entries.append({**entry, "data": data, "share": share, "rng": _generators([dict(entry)], (rank - own) % count)})
    return entries


def _world(replicas: int, processes: int) -> str:
    return f"{replicas} replica(s) of the model on {processes} process(es)"
