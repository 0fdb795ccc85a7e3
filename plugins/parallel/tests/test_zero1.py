"""zero1: what a rank leaves out, and the state that comes to rank 0."""

import optimizer_shares
import pytest
import torch
from training_script import assert_nothing_left
from training_script import run as run_script
from world import joined, rank

pytestmark = pytest.mark.timeout(170)


def test_zero1_missing_parameter_is_explained(tmp_path):
    """A parameter that one rank leaves out is an error with a way out."""
    result = run_script(tmp_path / "run", unused="on_rank_1", trainer={"strategy": "zero1"})
    assert result.code == 1
    assert "'extra.weight', 'extra.bias' were not used by training_step on rank 1" in result.stderr
    assert "ZeRO1Strategy(find_unused_parameters=True)" in result.stderr
    assert_nothing_left(tmp_path / "run")


class Twin(torch.nn.Module):
    """``extra`` is used on rank 0 only, ``never`` nowhere."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.extra, self.never = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, everything):
        x = self.body(x)
        return (self.extra(x) if everything else x).square().mean()


def loss_of(model, r):
    return model(torch.arange(8.0).view(2, 4) / (1 + r), r == 0)


def steps(strategy, kind, count=3, **options):
    """A twin and its optimizer after some steps of a joined strategy; parameters of one group and of a second."""
    model = Twin()
    model.training_step = lambda batch, batch_idx: loss_of(model, rank())
    strategy.connect(model)
    strategy.setup_model()
    parameters = list(model.parameters())
    optimizer = kind([{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.5}], lr=0.1, **options)
    strategy.setup_optimizers([optimizer])
    step = strategy.step_function("training_step")
    for _ in range(count):
        optimizer.zero_grad()
        strategy.backward(step(None, 0))
        strategy.optimizer_step(optimizer)
    return model, optimizer


def plain_twin(kind, count=3, **options):
    model = Twin()
    parameters = list(model.parameters())
    optimizer = kind([{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.5}], lr=0.1, **options)
    for _ in range(count):
        optimizer.zero_grad()
        ((loss_of(model, 0) + loss_of(model, 1)) / 2).backward()
        optimizer.step()
    return model, optimizer


KINDS = {
    "adamw": (torch.optim.AdamW, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
}


def whole_state(name):
    """(state that zero1 gathers, the most bytes of it that another rank has sent at once)."""
    from torchhal_parallel.zero1 import ZeRO1Strategy

    kind, options = KINDS[name]
    with joined(ZeRO1Strategy(find_unused_parameters=True)) as strategy:
        model, optimizer = steps(strategy, kind, **options)
        state = strategy.optimizer_state(optimizer)
        again = kind([{"params": list(model.parameters())[:3]}, {"params": list(model.parameters())[3:]}], lr=9.0)
        strategy.setup_optimizers([again])
        strategy.load_optimizer_state(again, strategy.broadcast(state))
        assert again.param_groups[1]["weight_decay"] == 0.5 and again.param_groups[0]["lr"] == 0.1
        back = strategy.optimizer_state(again)
        return state if rank() == 0 else sorted(state["state"]), back if rank() == 0 else sorted(back["state"])


@pytest.mark.parametrize("name", KINDS)
def test_the_gathered_state_is_the_undivided_optimizers(world2, name):
    (state, back), (others, others_back) = world2.run(whole_state, name)
    _, optimizer = plain_twin(KINDS[name][0], **KINDS[name][1])
    expected = optimizer.state_dict()
    stepped = range(
        6 if name == "adagrad" else 4
    )  # its state begins before the steps, else what is never used has none
    assert sorted(state["state"]) == sorted(expected["state"]) == list(stepped)
    assert 0 < len(others) < len(stepped) and others == others_back, (
        "the other rank keeps its own part, and gets no more"
    )
    for index, entry in expected["state"].items():
        assert list(state["state"][index]) == list(entry)
        for key, value in entry.items():
            torch.testing.assert_close(state["state"][index][key], value)
            assert torch.equal(torch.as_tensor(back["state"][index][key]), torch.as_tensor(state["state"][index][key]))
    assert [group["params"] for group in state["param_groups"]] == [[0, 1, 2], [3, 4, 5]]


def brought(sizes):
    """What rank 0, and then every rank, gets of the nests that the ranks bring, and the bytes of each message."""
    import torch.distributed as dist

    from torchhal_parallel import _gathering as gathering

    sent, send = [], dist.send
    gathering.dist.send = lambda tensor, dst: (sent.append(tensor.nbytes), send(tensor, dst=dst))
    try:
        with joined() as strategy:
            tensors = {
                name: torch.full(shape, 1.5 + rank(), dtype=dtype).t() if len(shape) == 2 else torch.ones(shape)
                for name, shape, dtype in sizes
            }
            mine = {
                **tensors, "rank": rank(), "n": [None, (torch.tensor(True), "x")], "sparse": torch.eye(2).to_sparse(),
                "conj": torch.tensor([1 + 2j]).conj(),
            }  # fmt: skip
            first = gathering.on_first_rank(mine, strategy.root_device)
            every = gathering.on_every_rank(mine, strategy.root_device)
            for part in (*(first or ()), *every):
                part["conj"] = part["conj"].tolist()  # on its way to the test the sign would be lost
    finally:
        gathering.dist.send = send
    return first, every, sent


def test_what_ranks_bring_comes_one_tensor_at_a_time(world2):
    sizes = [("a", (3, 5), torch.bfloat16), ("b", (), torch.float32), ("c", (0, 7), torch.float64)]
    sizes += [(f"big{index}", (100, 10), torch.complex64) for index in range(3)]
    (first, every, _), (nothing, again, sent) = world2.run(brought, sizes)
    assert nothing is None and sorted(sent) == [1, 4, 8, 30, 8000, 8000, 8000]
    for parts in (first, every, again):
        assert [part["rank"] for part in parts] == [0, 1]
        for number, part in enumerate(parts):
            for name, shape, dtype in sizes:
                whole = torch.full(shape, 1.5 + number, dtype=dtype).t() if len(shape) == 2 else torch.ones(shape)
                assert part[name].dtype == whole.dtype and torch.equal(part[name], whole)
            assert part["n"] == [None, (torch.tensor(True), "x")]
            assert torch.equal(part["sparse"].to_dense(), torch.eye(2)) and part["conj"] == [1 - 2j]


def test_a_rank_without_a_parameter_skips_what_the_others_skip(world4):
    """Of four ranks two step nothing; a loss that overflows is no step for any of them."""
    results = world4.run(optimizer_shares.trained, "zero1", "Head", "16-mixed", 4, timeout=60)
    expected = world4.run(optimizer_shares.trained, "ddp", "Head", "16-mixed", 4, timeout=60)
    assert expected[0][2].count(1e-2) > 2, "nothing overflowed: the scheduler waits for a step"
    for (weights, _, rates, steps), (others, _, other_rates, other_steps) in zip(results, expected, strict=True):
        assert (rates, steps) == (other_rates, other_steps)
        assert all(torch.equal(weights[name], value) for name, value in others.items())


def test_hooks_after_the_step_see_and_change_whole_weights(world2):
    results = world2.run(optimizer_shares.trained, "zero1", "Averaging", "32-true", 2, timeout=60)
    expected = world2.run(optimizer_shares.trained, "ddp", "Averaging", "32-true", 2, timeout=60)
    for (weights, averages, _, _), (others, other_averages, _, _) in zip(results, expected, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in others.items())
        assert all(torch.equal(averages[name], value) for name, value in other_averages.items())


def test_a_parameter_that_each_rank_trains_by_itself_is_refused(world2):
    for told in world2.run(optimizer_shares.refused_ignored, timeout=60):
        assert told.startswith("ModelError") and "each rank is to train 'head.bias' of " in told
