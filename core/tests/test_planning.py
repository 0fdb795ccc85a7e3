"""strategy="auto" by memory, on one device: what is read and copied before the choice, and what the choice follows."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_models import MODELS, QUIET, loader, planned_run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import torchhal
from torchhal import Trainer
from torchhal.accelerators import CPUAccelerator
from torchhal.accelerators._host_memory import available_host_memory
from torchhal.errors import InsufficientMemoryError, ModelError
from torchhal.plugin import Candidate, Component
from torchhal.resolve._options import StrategyOption
from torchhal.step_memory import MemoryByPhase, PhaseMemory, StepMemory
from torchhal.strategies._fused_optimizers import can_fuse, fuse, unfuse
from torchhal.trainer.planning._choice import MARGIN, Candidacy, NoCandidateLeftError, choose
from torchhal.trainer.planning._first_batch import first_batch


@pytest.fixture
def sim() -> None:
    pytest.importorskip("torchhal_simulator").load()


# -- the declaration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([Candidate(1)], "tuple of Candidate"),
        (("zero3",), "tuple of Candidate"),
        ((Candidate(-1),), "'cost'"),
        ((Candidate(True),), "'cost'"),
        ((Candidate(float("nan")),), "'cost'"),
        ((Candidate("cheap"),), "'cost'"),  # type: ignore[arg-type]
        ((Candidate(1, {3: 4}),), "'options'"),  # type: ignore[dict-item]
        ((Candidate(1, multiple_of=0),), "'multiple_of'"),
    ],
)
def test_a_wrong_candidate_is_a_problem_of_its_component(candidates: Any, reason: str) -> None:
    problem = Component("mine", "package.module:Class", candidates=candidates).problem("strategy")
    assert problem is not None and reason in problem


def test_only_strategies_have_candidates() -> None:
    component = Component("mine", "package.module:Class", candidates=(Candidate(5, {"a": 1}),))
    assert component.problem("strategy") is None
    assert "forms of a strategy" in (component.problem("precision") or "")


# -- the choice -------------------------------------------------------------------------------------------------------


def candidacy(index: int, peak: int | None) -> Candidacy:
    option = StrategyOption(f"s{index}", Candidate(index), None)
    if peak is None:
        return Candidacy(option, reason="can't be")
    phase = PhaseMemory(peak)
    return Candidacy(option, False, MemoryByPhase(phase, phase, phase), StepMemory(0, 0, 0, 0))


@given(
    st.lists(st.one_of(st.none(), st.integers(1, 1000)), max_size=8).filter(any),
    st.integers(1, 1200),
    st.sets(st.integers(0, 7)),
)
def test_the_first_that_fits_with_the_margin_or_else_the_smallest(
    peaks: list[int | None], limit: int, failed: set[int]
) -> None:
    rows = [candidacy(index, peak) for index, peak in enumerate(peaks)]
    excluded = {rows[index].name for index in failed if index < len(rows)}
    left = [(index, peak) for index, peak in enumerate(peaks) if peak is not None and index not in failed]
    fitting = [index for index, peak in left if round(peak * (1 + MARGIN)) <= limit]
    if not left:
        with pytest.raises(NoCandidateLeftError):
            choose(rows, limit, excluded)
        return
    found = choose(iter(rows), limit, excluded)
    expected = fitting[0] if fitting else min(left, key=lambda item: item[1])[0]
    assert (found.chosen.option.alias, found.fits) == (f"s{expected}", bool(fitting))
    assert (found.missing == 0) == (round((peaks[expected] or 0) * (1 + MARGIN)) <= limit)


# -- the batch --------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Any:
        for index in range(100):
            self.taken += 1
            yield torch.tensor([float(index)])


def test_a_batch_is_read_without_a_trace() -> None:
    data = TensorDataset(torch.arange(10.0))
    generator = torch.Generator().manual_seed(3)
    shuffled = DataLoader(data, 4, shuffle=True, generator=generator, num_workers=0)
    before, numbers = generator.get_state(), torch.get_rng_state()
    assert first_batch(shuffled)[0].shape == (4,)
    assert torch.equal(generator.get_state(), before) and torch.equal(torch.get_rng_state(), numbers)
    assert first_batch(DataLoader(data, 64))[0].shape == (10,)
    assert first_batch(DataLoader(data, batch_size=None))[0].shape == ()
    sampler = BatchSampler(RandomSampler(data, generator=generator), 3, False)
    assert first_batch(DataLoader(data, batch_sampler=sampler))[0].shape == (3,)
    assert torch.equal(generator.get_state(), before)
    stream = Stream()
    assert first_batch(DataLoader(stream, 5)).shape == (5, 1) and stream.taken == 0
    assert first_batch([1, 2]) == 1


@pytest.mark.parametrize("empty", [[], DataLoader(TensorDataset(torch.empty(0)), 2), iter([1]), (x for x in [1])])
def test_a_batch_that_would_be_missing_is_not_taken(empty: Any) -> None:
    with pytest.raises(ModelError):
        first_batch(empty)


# -- memory of devices ------------------------------------------------------------------------------------------------


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


def test_host_memory_is_what_is_available_within_all_cgroups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert available_host_memory(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 99999 kB\nMemAvailable:    8000 kB\n")
    assert available_host_memory(proc, groups) == 8000 * 1024
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    write(groups / "job" / "step", memory_max="max\n", memory_current="1000\n", memory_stat="inactive_file 0\n")
    assert available_host_memory(proc, groups) == 8000 * 1024
    write(groups / "job", memory_max="5000000\n", memory_current="1000000\n", memory_stat="inactive_file 300000\n")
    assert available_host_memory(proc, groups) == 4300000
    (proc / "self" / "cgroup").write_text("5:cpu:/x\n4:memory:/job\n")
    old = groups / "memory" / "job"
    write(old, memory_limit_in_bytes="3000000\n", memory_usage_in_bytes="2000000\n")
    assert available_host_memory(proc, groups) == 1000000
    write(old, memory_limit_in_bytes=f"{2**63 - 4096}\n")
    assert available_host_memory(proc, groups) == 8000 * 1024


def test_available_memory_of_devices(sim: None) -> None:
    import torchhal_simulator

    available = CPUAccelerator().available_memory(torch.device("cpu"))
    assert available is not None and available > 2**20
    accelerator = torchhal.registry.find("accelerator", "sim").create()
    device = torch.device("sim", 0)
    with torchhal_simulator.simulate(memory=2**25):
        before = accelerator.available_memory(device)
        held = torch.empty(2**20, dtype=torch.uint8, device=device)
        assert accelerator.available_memory(device) == before - 2**20
        del held


def test_what_others_hold_on_the_device_is_not_planned_with(sim: None) -> None:
    import torchhal_simulator

    with torchhal_simulator.simulate(memory=80_000_000):
        held = torch.empty(50_000_000, dtype=torch.uint8, device="sim")
        assert fit_with(MODELS["Deep"](), 80_000_000)["fused"] is True
        del held


# -- fused optimizers -------------------------------------------------------------------------------------------------


def test_only_optimizers_that_leave_it_open_are_fused() -> None:
    weights = [nn.Parameter(torch.ones(3))]
    open_ = torch.optim.AdamW(weights)
    assert can_fuse([open_], "cpu") and not can_fuse([], "cpu") and not can_fuse([open_], "nowhere")
    for optimizer in (
        torch.optim.SGD(weights, lr=1),
        torch.optim.Adam(weights, fused=False),
        torch.optim.Adam(weights, foreach=True),
        torch.optim.Adam(weights, lr=torch.tensor(0.1)),
    ):
        assert not can_fuse([open_, optimizer], "cpu"), optimizer
    fuse([open_])
    weights[0].grad = torch.ones(3)
    open_.step()
    assert open_.param_groups[0]["fused"] is True
    unfuse([open_])
    assert open_.param_groups[0]["fused"] is None


# -- fits -------------------------------------------------------------------------------------------------------------


def test_the_fused_optimizer_where_the_step_decides(sim: None) -> None:
    plenty, peak, _ = planned_run("Deep", 1, 80_000_000)
    assert (plenty["alias"], plenty["fused"], plenty["tried"]) == ("single_device", False, False)
    assert peak == pytest.approx(31.71e6, rel=0.01)
    short, peak, model = planned_run("Deep", 1, 30_000_000)
    assert (short["alias"], short["fused"]) == ("single_device", True) and peak <= 30_000_000
    assert "optimizer" in short["reason"] and "single_device would need" in short["reason"]
    for parameter, expected in zip(model.parameters(), trained("Deep").parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu(), expected, rtol=1e-4, atol=1e-6)


def trained(name: str) -> nn.Module:
    """The model of :func:`planned_run`, by a plain loop on the CPU."""
    torch.manual_seed(0)
    model = MODELS[name]()
    return step_by_hand(model, loader(model))


def step_by_hand(model: nn.Module, batches: Any) -> nn.Module:
    optimizer = model.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    return model


def test_what_nothing_makes_fit_is_refused_with_what_would(sim: None) -> None:
    with pytest.raises(InsufficientMemoryError) as caught:
        planned_run("Deep", 1, 16_000_000)
    said = str(caught.value)
    assert "no strategy makes a training step of Deep fit" in said and "too much" in said
    assert "What would bring it: 2 devices, with zero3" in said and "bf16-true" in said
    with pytest.raises(InsufficientMemoryError, match=r"about (half|a quarter|an eighth) of the batch"):
        planned_run("Conv", 1, 6_000_000)


def test_a_small_model_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchhal.trainer.planning._decision", None)  # its import would fail
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, **QUIET)  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    model.training_step = lambda batch, index: model(batch).sum()  # type: ignore[assignment]
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), 0.1)  # type: ignore[assignment]
    trainer.fit(model, [torch.ones(1, 2)])
    assert trainer._run.auto is not None and trainer._run.auto.decision is None


def test_a_named_strategy_is_not_replaced(sim: None) -> None:
    trainer = Trainer(accelerator="sim", devices=1, strategy="single_device", **QUIET)  # type: ignore[arg-type]
    assert trainer._run.auto is None


class ReadsValues(MODELS["Deep"]):  # type: ignore[misc, valid-type]
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = 1.0 if batch[0].sum().item() > 1e9 else 2.0
        return super().training_step(batch, batch_idx) * scale  # type: ignore[no-any-return]


class Unmeasurable(MODELS["Deep"]):  # type: ignore[misc, valid-type]
    def configure_optimizers(self) -> torch.optim.Optimizer:
        for parameter in self.parameters():
            assert parameter.sum().item() != 0.5
        return super().configure_optimizers()  # type: ignore[no-any-return]


class Late(MODELS["Deep"]):  # type: ignore[misc, valid-type]
    """Builds its layers in configure_model."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            MODELS["Deep"].__init__(self)


def fit_with(model: nn.Module, limit: int, data: Any = None, **options: Any) -> Any:
    import torchhal_simulator

    with torchhal_simulator.simulate(devices=1, memory=limit):
        torch.manual_seed(0)
        trainer = Trainer(accelerator="sim", devices=1, max_steps=2, **QUIET, **options)
        trainer.fit(model, loader(model) if data is None else data)
        return trainer._run.auto.decision  # type: ignore[union-attr]


def test_a_step_that_reads_values_is_taken_for_real(sim: None) -> None:
    decision = fit_with(ReadsValues(), 36_000_000)
    assert decision["alias"] == "single_device" and "31" not in decision["name"]


def test_optimizers_that_need_values_are_taken_for_adamw(sim: None) -> None:
    with pytest.warns(UserWarning, match=r"is single_device, by what is known: .*configure_optimizers.*item.*AdamW"):
        decision = fit_with(Unmeasurable(), 40_000_000)
    assert (decision["alias"], decision["fused"]) == ("single_device", False)


class Broken(MODELS["Deep"]):  # type: ignore[misc, valid-type]
    def configure_model(self) -> None:
        if self.layers[0].weight.is_meta:
            raise RuntimeError("not without values")


def test_what_cant_be_measured_keeps_the_default_with_the_reason(sim: None) -> None:
    with pytest.warns(UserWarning, match=r"stays with 'single_device': what a step needs is not known.*not without"):
        decision = fit_with(Broken(), 36_000_000)
    assert (decision["alias"], decision["fused"]) == ("single_device", False)


class Scheduled(MODELS["Deep"]):  # type: ignore[misc, valid-type]
    """Asks the Trainer for the length of its training, and for the rate of its optimizer."""

    trainer: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=int(steps))]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.trainer.optimizers[0].param_groups[0]["lr"] >= 0
        return super().training_step(batch, batch_idx)  # type: ignore[no-any-return]


def test_a_model_that_asks_the_trainer_is_measured(sim: None) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*strategy='auto'.*")
        assert fit_with(Scheduled(), 30_000_000)["fused"] is True


@pytest.mark.parametrize("answer", [RuntimeError("driver says no"), "45", -5, None])
def test_an_accelerator_that_cant_say_its_memory(sim: None, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    from torchhal_simulator.accelerator import SimAccelerator

    def available_memory(self: Any, device: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(SimAccelerator, "available_memory", available_memory)
    trainer = Trainer(accelerator="sim", devices=1, max_steps=1, **QUIET)  # type: ignore[arg-type]
    if answer is None:
        trainer.fit(MODELS["Deep"](), loader(MODELS["Deep"]()))  # type: ignore[arg-type]
    else:
        with pytest.warns(UserWarning, match="nothing is planned"):
            trainer.fit(MODELS["Deep"](), loader(MODELS["Deep"]()))  # type: ignore[arg-type]
    assert trainer._run.auto is not None and trainer._run.auto.decision is None


def test_layers_that_are_built_later_are_measured(sim: None) -> None:
    assert fit_with(Late(), 30_000_000)["fused"] is True


def test_a_loader_that_can_be_read_once_is_left_alone(sim: None) -> None:
    model = MODELS["Deep"]()
    batches, expected = loader(model), copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"'auto' is single_device, by what is known: .*gives its batches only once"):
        fit_with(model, 40_000_000, iter(batches))
    step_by_hand(expected, batches[:2])
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.cpu(), other, rtol=1e-4, atol=1e-6)


class Data:
    """A data module that counts."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.trainer: Any = None

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append("setup")
        self.ready = True

    def train_dataloader(self) -> Any:
        assert self.ready
        return loader(MODELS["Deep"]())


def test_hooks_of_the_data_are_called_once(sim: None) -> None:
    import torchhal_simulator

    data = Data()
    with torchhal_simulator.simulate(devices=1, memory=30_000_000):
        trainer = Trainer(accelerator="sim", devices=1, max_steps=2, **QUIET)  # type: ignore[arg-type]
        trainer.fit(MODELS["Deep"](), datamodule=data)  # type: ignore[arg-type]
    assert data.calls == ["prepare", "setup"]
    assert trainer._run.auto is not None and trainer._run.auto.decision is not None
    assert trainer._run.auto.decision["fused"]


class Lazily(torch.utils.data.Dataset[Any]):
    """Opens its file at the first access, as a worker should."""

    def __init__(self) -> None:
        self.file: Any = None

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or f"the file of process {os.getpid()}"
        return torch.randn(256), torch.randn(256)


def test_a_dataset_opens_nothing_here(sim: None) -> None:
    dataset = Lazily()
    first_batch(DataLoader(torch.utils.data.Subset(dataset, range(64)), 8))
    assert dataset.file is None


def test_a_stream_is_not_tried(sim: None) -> None:
    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.taken = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            self.taken += 1
            if self.taken > 256:
                raise StopIteration
            return torch.randn(256), torch.randn(256)

    stream = Once()
    decision = fit_with(MODELS["Deep"](), 30_000_000, DataLoader(stream, 64))
    assert decision["fused"] and not decision["tried"]
    assert stream.taken <= 3 * 64, "two batches of the fit, and the one that the loader reads ahead"


def test_a_fused_optimizer_is_no_part_of_a_checkpoint(sim: None, tmp_path: Path) -> None:
    """A fit that is planned anew steps as it is planned, whichever way the file's steps were taken."""
    import torchhal_simulator

    path = tmp_path / "deep.ckpt"
    for limit, ckpt_path, fused in ((30_000_000, None, True), (90_000_000, path, False), (30_000_000, path, True)):
        with torchhal_simulator.simulate(devices=1, memory=limit):
            trainer = Trainer(
                accelerator="sim", devices=1, max_steps=2 if ckpt_path is None else 4, **QUIET
            )  # type: ignore[arg-type]  # fmt: skip
            model = MODELS["Deep"]()
            trainer.fit(model, loader(model), ckpt_path=ckpt_path)  # type: ignore[arg-type]
            assert bool(trainer.optimizers[0].param_groups[0]["fused"]) is fused
            if ckpt_path is None:
                trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"][0]
    assert saved["fused"] is None


def test_planning_and_trying_leave_no_trace(sim: None) -> None:
    """A tight fit, of which two steps are tried, is bit for bit that of the strategy by name."""
    import torchhal_simulator

    states = []
    for strategy in ("auto", "single_device"):
        with torchhal_simulator.simulate(devices=1, memory=37_000_000):
            torch.manual_seed(0)
            model = MODELS["Deep"]()
            data = DataLoader(TensorDataset(*model.batch(256)), 64, shuffle=True)
            trainer = Trainer(accelerator="sim", devices=1, strategy=strategy, max_steps=3, **QUIET)  # type: ignore[arg-type]
            trainer.fit(model, data)
            states.append((copy.deepcopy(model.state_dict()), torch.get_rng_state()))
            if strategy == "auto":
                assert trainer._run.auto is not None and trainer._run.auto.decision is not None
                assert trainer._run.auto.decision["tried"] and not trainer._run.auto.decision["fused"]
    for name, value in states[0][0].items():
        assert torch.equal(value.cpu(), states[1][0][name].cpu()), name
    assert torch.equal(states[0][1], states[1][1])


# -- batch sizes ------------------------------------------------------------------------------------------------------


def fit_with_batch_size(limit: int, samples: int, size: int, waste: int = 0, **options: Any) -> tuple[Any, Any, int]:
    """Return the decision, the sizes of the batches that were trained on, and the peak."""
    from memory_models import PeakOf

    import torchhal_simulator

    sizes: list[int] = []
    peaks: list[int] = []

    class Watched(MODELS["Deep"]):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            sizes.append(len(batch[0]))
            loss: torch.Tensor = super().training_step(batch, batch_idx)
            if waste and not isinstance(loss, FakeTensor):  # which a fake step can't see
                loss = loss + torch.empty(waste * sizes[-1], dtype=torch.uint8, device=loss.device)[:1].sum() * 0
            return loss

    with torchhal_simulator.simulate(devices=1, memory=limit):
        torch.manual_seed(0)
        model = Watched()
        trainer = Trainer(
            accelerator="sim", devices=1, max_epochs=1, batch_size="auto", **{**QUIET, **options},
        )  # type: ignore[arg-type]  # fmt: skip
        trainer.callbacks.append(PeakOf(torch.get_device_module("sim"), peaks))
        data = TensorDataset(*model.batch(samples))
        trainer.fit(model, DataLoader(data, size))
    assert trainer._run.auto is not None
    return trainer._run.auto.decision, sizes, peaks[-1]


def test_the_largest_batch_that_fits(sim: None) -> None:
    decision, sizes, peak = fit_with_batch_size(80_000_000, 2048, 48)
    assert decision["batch_size"] == 1024 and decision["alias"] == "single_device"
    assert sizes[-2:] == [1024] * 2 and peak <= 80_000_000
    assert 2 * 1024 * 24 * 1024 + 25e6 > 80e6 / 1.12, "twice as many would not fit"


def test_a_batch_that_runs_out_of_memory_is_halved(sim: None) -> None:
    said = "a batch of 1024 samples was chosen, but it ran out of memory in its first steps. .* with a batch of 512 "
    with pytest.warns(UserWarning, match=said):
        decision, sizes, peak = fit_with_batch_size(80_000_000, 2048, 48, waste=40_000)
    assert decision["batch_size"] == 512 and sizes[-4:] == [512] * 4 and peak <= 80_000_000


def test_no_batch_is_larger_than_the_data(sim: None) -> None:
    decision, sizes, _ = fit_with_batch_size(800_000_000, 300, 16)
    assert decision["batch_size"] == 256 and sizes[-2:] == [256, 44]


def test_a_batch_that_fits_by_no_margin_stays(sim: None) -> None:
    assert fit_with_batch_size(80_000_000, 4096, 1500)[0]["batch_size"] == 1500


def test_batches_without_a_size_are_refused(sim: None) -> None:
    trainer = Trainer(accelerator="sim", devices=1, batch_size="auto", **QUIET)  # type: ignore[arg-type]
    with pytest.raises(torchhal.errors.ConfigurationError, match="the batch size of what was passed can't be changed"):
        trainer.fit(MODELS["Deep"](), loader(MODELS["Deep"]()))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["AUTO", 32, True, 0, "largest"])
def test_nonsense_for_a_batch_size(value: Any) -> None:
    with pytest.raises(torchhal.errors.ConfigurationError, match="'batch_size' must be 'auto'"):
        Trainer(batch_size=value)


def test_a_run_that_is_continued_keeps_its_batch_size(sim: None, tmp_path: Path) -> None:
    kept = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    first = fit_with_batch_size(80_000_000, 2048, 48, **kept)[0]
    path = next(tmp_path.rglob("*.ckpt"))
    import torchhal_simulator

    with torchhal_simulator.simulate(devices=1, memory=400_000_000):
        trainer = Trainer(
            accelerator="sim", devices=1, max_epochs=2, batch_size="auto", **QUIET
        )  # type: ignore[arg-type]  # fmt: skip
        model = MODELS["Deep"]()
        trainer.fit(model, DataLoader(TensorDataset(*model.batch(2048)), 48), ckpt_path=path)  # type: ignore[arg-type]
    assert trainer._run.auto is not None and trainer._run.auto.decision is not None
    assert trainer._run.auto.decision["batch_size"] == first["batch_size"] == 1024
    assert trainer.global_step == 4
