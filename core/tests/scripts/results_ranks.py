"""One rank of a gloo job that checks Results: ``results_ranks.py RANK WORLD_SIZE STORE_FILE``; exit code 0 is success.

Each scenario is compared with plain arithmetic on what all ranks logged.
"""

import math
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from torchhal.distributed import collectives
from torchhal.errors import ConfigurationError
from torchhal.trainer.logging._logged_metrics import Results


class Gloo:
    """The part of a strategy that Results needs, over a process group."""

    def __init__(self, group):
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.global_rank = dist.get_rank(group)
        self.collectives = 0
        self.is_data_leader = True

    def all_gather_object(self, value):
        self.collectives += 1
        return collectives.all_gather_object(value, self.group)

    def reduce(self, value, op="mean"):
        self.collectives += 1
        return collectives.reduce(value, op, device=torch.device("cpu"), group=self.group)


class Accuracy(torch.nn.Module):
    """A metric object that sums over ranks in compute, as such libraries do."""

    def __init__(self, group):
        super().__init__()
        self.group = group
        self.reset()

    def reset(self):
        self.counts = torch.zeros(2)

    def update(self, right, all):
        self.counts += torch.tensor([right, all])

    def compute(self):
        counts = self.counts.clone()
        dist.all_reduce(counts, group=self.group)
        return counts[0] / counts[1]


def raises(kind, function, *fragments):
    try:
        function()
    except kind as error:
        for fragment in fragments:
            assert fragment in str(error), (fragment, str(error))
        return
    raise AssertionError(f"no {kind.__name__}")


def uneven_batches(ranks, results):
    # rank r has r batches of r + 1 samples each: rank 0 none at all
    results.stage = "validate"
    for index in range(ranks.global_rank):
        results.start_batch((torch.zeros(ranks.global_rank + 1, 2), None))
        value = torch.tensor(10.0 * ranks.global_rank + index)
        for reduction in ("mean", "sum", "min", "max"):
            results.log(f"v_{reduction}", value, "validation_step", reduce_fx=reduction, prog_bar=True)
    before = ranks.collectives
    results.finalize_epoch()
    assert ranks.collectives == before + 1, "an epoch's values cost one collective"
    logged = [(10.0 * r + i, r + 1) for r in range(ranks.world_size) for i in range(r)]
    expected = {
        "v_mean": sum(v * w for v, w in logged) / sum(w for _, w in logged),
        "v_sum": sum(v for v, _ in logged),
        "v_min": min(v for v, _ in logged),
        "v_max": max(v for v, _ in logged),
    }
    for name, value in expected.items():
        assert math.isclose(float(results.callback_metrics[name]), value, rel_tol=1e-7), name
        assert results.callback_metrics[name].dtype is torch.float32
    assert results.progress_bar_metrics.keys() == expected.keys(), "shown on ranks that logged nothing too"
    assert ranks.collectives == before + 1, "reading communicates"


def some_ranks_only(ranks, results):
    results.log(f"only_{ranks.global_rank}", float(ranks.global_rank), "on_train_epoch_end")
    if ranks.global_rank != 0:
        results.log("not_on_zero", 4.0 * ranks.global_rank, "on_train_epoch_end")
    results.log("mine", float(ranks.global_rank), "on_train_epoch_end", sync_dist=False)
    results.log("zero", 5.0, "on_train_epoch_end", rank_zero_only=True)
    results.finalize_epoch()
    metrics = results.callback_metrics
    others = range(1, ranks.world_size)
    assert all(float(metrics[f"only_{rank}"]) == rank for rank in range(ranks.world_size))
    assert float(metrics["not_on_zero"]) == sum(4.0 * rank for rank in others) / len(others)
    assert float(metrics["mine"]) == ranks.global_rank
    assert ("zero" in metrics) == (ranks.global_rank == 0)
    orders = ranks.all_gather_object([name for name in metrics if name not in ("zero", "mine")])
    assert all(order == orders[0] for order in orders)


def steps(ranks, results):
    before = ranks.collectives
    results.log("own", torch.tensor(float(ranks.global_rank)), "training_step")
    assert ranks.collectives == before, "a step's value is this rank's unless asked for"
    results.log("all", torch.tensor(float(ranks.global_rank)), "training_step", sync_dist=True, on_epoch=True)
    mean = sum(range(ranks.world_size)) / ranks.world_size
    assert float(results.callback_metrics["own"]) == ranks.global_rank
    assert math.isclose(float(results.callback_metrics["all"]), mean, rel_tol=1e-6)
    results.finalize_epoch()
    assert math.isclose(float(results.callback_metrics["all_epoch"]), mean, rel_tol=1e-6)


def steps_that_end_on_the_last_rank(ranks, results):
    """As in a pipeline: the other ranks show what it logged, once all look, and what they logged themselves stays."""
    last = ranks.world_size - 1
    ranks.is_data_leader = ranks.global_rank == last
    results.find_leader()
    assert results.leader == last
    if ranks.is_data_leader:
        results.log("loss", torch.tensor(0.1), "training_step", prog_bar=True, on_epoch=True)
        results.log("all", 3.0, "training_step", sync_dist=True)
        results.log("unsynced", 4.0, "training_step", on_step=False, on_epoch=True, sync_dist=False)
        results.log("first", 5.0, "training_step", on_epoch=True, rank_zero_only=True)
    results.log("own", float(ranks.global_rank), "on_train_batch_end")
    before = ranks.collectives
    assert ("loss" in results.callback_metrics) == ranks.is_data_leader
    results.share_steps()
    assert ranks.collectives == before + 1
    expected = {"loss": torch.tensor(0.1), "loss_step": torch.tensor(0.1), "all": torch.tensor(3.0).double()}
    for name, value in expected.items():
        assert torch.equal(results.callback_metrics[name], value), name
        assert results.callback_metrics[name].dtype is value.dtype
    assert float(results.callback_metrics["own"]) == ranks.global_rank
    assert results.step_metrics().keys() == {"loss_step", "all", "own", "first_step"}
    assert results.progress_bar_metrics.keys() == {"loss_step"}
    if ranks.is_data_leader:
        results.log("loss", torch.tensor(0.3), "training_step", prog_bar=True, on_epoch=True)
    state = results.state_dict()
    assert math.isclose(state["callback_metrics"]["loss_step"], 0.3, rel_tol=1e-6), "rank 0's copy is saved"
    before = ranks.collectives
    results.finalize_epoch()
    assert ranks.collectives == before + 1
    for name, value in {"loss_epoch": 0.2, "loss_step": 0.3, "loss": 0.2, "unsynced": 4.0, "first_epoch": 5.0}.items():
        assert math.isclose(float(results.callback_metrics[name]), value, rel_tol=1e-6), name
    assert results.epoch_metrics().keys() == {"loss_epoch", "unsynced", "first_epoch"}
    ranks.is_data_leader = True


def values_of_several_leaders(ranks, results):
    """Two of three ranks or more end a step: sync_dist=True makes one value of theirs, where all look."""
    ranks.is_data_leader = ranks.global_rank > 0
    results.find_leader()
    assert results.leader == 1
    if ranks.is_data_leader:
        results.log("own", float(ranks.global_rank), "training_step")
        results.log("all", float(ranks.global_rank), "training_step", sync_dist=True)
    results.share_steps()
    assert float(results.callback_metrics["own"]) == max(1, ranks.global_rank)
    assert float(results.callback_metrics["all"]) == sum(range(ranks.world_size)) / (ranks.world_size - 1)
    results.finalize_epoch()
    ranks.is_data_leader = True


def disagreement(ranks, results):
    reduction = "mean" if ranks.global_rank == 0 else "sum"
    results.log("x", 1.0, "on_train_epoch_end", reduce_fx=reduction)
    raises(ConfigurationError, results.finalize_epoch, "'x'", "every rank", "reduction")


def metric_objects(ranks, results):
    results.module = module = torch.nn.Module()
    module.accuracy = Accuracy(ranks.group)
    results.stage = "validate"
    if ranks.global_rank != 0:  # rank 0 has no batch and must still take part in compute
        module.accuracy.update(ranks.global_rank, 4)
        results.log("accuracy", module.accuracy, "validation_step")
    results.finalize_epoch()
    others = range(1, ranks.world_size)
    assert math.isclose(float(results.callback_metrics["accuracy"]), sum(others) / (4 * len(others)), rel_tol=1e-6)
    results.reset()


def resume_with_fewer(ranks, results, pair):
    """All ranks accumulate and save; then only two of them go on."""
    for value, size in ((1.0, 2), (float(ranks.global_rank), 3)):
        results.start_batch(torch.zeros(size))
        results.log("loss", torch.tensor(value), "training_step", on_epoch=True)
        results.log("worst", value, "training_step", on_step=False, on_epoch=True, reduce_fx="max")
    state = results.state_dict()
    weighted = [(1.0, 2)] * ranks.world_size + [(float(rank), 3) for rank in range(ranks.world_size)]
    if pair is not None:
        resumed = Results(pair)
        resumed.load_state_dict(state)
        resumed.start_batch(torch.zeros(5))
        resumed.log("loss", torch.tensor(7.0), "training_step", on_epoch=True)  # "worst" is not logged again
        resumed.finalize_epoch()
        weighted += [(7.0, 5)] * 2
        expected = sum(v * w for v, w in weighted) / sum(w for _, w in weighted)
        assert math.isclose(float(resumed.callback_metrics["loss_epoch"]), expected, rel_tol=1e-6)
        assert float(resumed.callback_metrics["worst"]) == max(1.0, ranks.world_size - 1)


def resume_with_other_leaders(ranks, results):
    """Ranks that share a batch, of which the first leads, save; the last one leads those that go on."""
    last = ranks.world_size - 1
    ranks.is_data_leader = ranks.global_rank == 0
    results.find_leader()
    results.log("loss", 2.0, "training_step", on_epoch=True, reduce_fx="sum")
    state = results.state_dict()
    ranks.is_data_leader = ranks.global_rank == last
    resumed = Results(ranks)
    resumed.find_leader()
    resumed.load_state_dict(state)
    if ranks.is_data_leader:
        resumed.log("loss", 3.0, "training_step", on_epoch=True, reduce_fx="sum")
    resumed.finalize_epoch()
    assert float(resumed.callback_metrics["loss_epoch"]) == 5.0
    ranks.is_data_leader = True


def main():
    rank, world_size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    everybody, two = dist.group.WORLD, dist.new_group([0, 1])
    pair = Gloo(two) if rank < 2 else None
    for ranks in [Gloo(everybody), *([pair] if pair else [])]:
        for scenario in (
            uneven_batches, some_ranks_only, steps, steps_that_end_on_the_last_rank, values_of_several_leaders,
            disagreement, metric_objects,
        ):  # fmt: skip
            scenario(ranks, Results(ranks))
    ranks = Gloo(everybody)
    resume_with_fewer(ranks, Results(ranks), pair)
    resume_with_other_leaders(ranks, Results(ranks))
    dist.barrier()
    dist.destroy_process_group()


main()
