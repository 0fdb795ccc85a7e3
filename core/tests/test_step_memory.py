"""The memory of a training step: what a fake one finds against a device's counts, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import memory_models
import pytest
import torch
from held_out_models import HELD_OUT
from memory_models import MODELS, measured_peak, predicted
from torch import nn

from torchhal import cli, rng
from torchhal.accelerators import CPUAccelerator
from torchhal.errors import FakeStepError
from torchhal.memory_estimate import MemoryEstimate, ModelMemory, build_model, model_memory
from torchhal.precision import Precision
from torchhal.step_memory import MemoryByPhase, Moment, PhaseMemory, StepMemory, phases_of, unknown_step
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy
from torchhal.trainer._fake_step import FakeStep
from torchhal.trainer._real_step import RealStep


def sizes(model: type[nn.Module]) -> ModelMemory:
    module = build_model(model)
    return model_memory(module, [module.configure_optimizers()])


def fake_step(name: str, device_type: str = "cpu") -> FakeStep:
    model = MODELS[name]()
    return FakeStep(model, [model.configure_optimizers()], model.batch(model.batch_size), device_type=device_type)


@pytest.fixture
def sim() -> None:
    pytest.importorskip("torchhal_simulator").load()


@pytest.mark.parametrize("name", MODELS)
def test_one_device_within_two_percent(sim: None, name: str) -> None:
    step, model = fake_step(name, "sim").measure(), sizes(MODELS[name])
    found = SingleDeviceStrategy().memory_by_phase(step, model, 1)
    assert found.peak == pytest.approx(measured_peak(MODELS[name], "single_device", 1), rel=0.02)
    assert found.note == ""
    deciding = {"Deep": "optimizer", "Wide": "optimizer", "Embedding": "optimizer"}
    assert found.phase == deciding.get(name, "backward")


FAST = ("Lstm", "Mixer", "HalfGpt", "Frozen", "LargeBatch", "Wave")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in HELD_OUT]
)
def test_one_device_held_out(sim: None, name: str) -> None:
    """Models that nothing was fitted to."""
    peak = measured_peak(HELD_OUT[name], "single_device", 1)
    assert predicted(HELD_OUT[name], SingleDeviceStrategy(), 1).peak == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"])
def test_a_loss_keeps_the_memory_of_its_elements(name: str) -> None:
    """torch's kernels compute them in the memory of their result, which stays of that size."""
    loss = getattr(nn.functional, name)

    class Net(memory_models.Trained):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return loss(self.layer(batch).sigmoid(), torch.ones_like(batch))

    model = Net()
    found = FakeStep(model, [model.configure_optimizers()], torch.zeros(4, 8), device_type="cpu").measure()
    real = loss(torch.full((4, 8), 0.5), torch.ones(4, 8))
    assert found.outputs == real.untyped_storage().nbytes() == 4 * 8 * 4


def test_numbers_that_are_trained_have_their_state_on_the_device() -> None:
    class Scaled(memory_models.Deep):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Any) -> Any:
            return super().forward(x) * self.scale

    module = build_model(Scaled)
    optimizer = module.configure_optimizers()
    model_memory(module, [optimizer])  # takes a step on the meta device
    assert FakeStep(module, [optimizer], Scaled.batch(4), device_type="cpu").measure(foreach=False).optimizer


def test_ddp_has_buckets_beside_gradients_or_under_them() -> None:
    step, model = fake_step("Deep").measure(), sizes(MODELS["Deep"])
    one = SingleDeviceStrategy().memory_by_phase(step, model, 1)
    buckets = DDPStrategy().memory_by_phase(step, model, 2)
    views = DDPStrategy(gradient_as_bucket_view=True).memory_by_phase(step, model, 2)
    gradients = model.estimate().gradients
    for name in ("forward", "backward", "optimizer"):
        assert buckets.phases[name].bytes - one.phases[name].bytes == gradients
    assert views.optimizer == one.optimizer
    assert views.forward.bytes - one.forward.bytes == step.gradients, "the buckets stay when gradients are cleared"
    assert views.backward.bytes < buckets.backward.bytes
    assert DDPStrategy().memory_by_phase(step, model, 1).peak == one.peak
    hooked = DDPStrategy(comm_hook=lambda state, bucket: bucket.buffer())
    assert "comm_hook" in hooked.memory_by_phase(step, model, 2).note


def test_foreach_is_the_device_s_default(sim: None) -> None:
    """Fake parameters have no default of torch's: on a device that has one they must step together all the same."""
    assert fake_step("Deep", "sim").measure().optimizer_temporary > 0.9 * sizes(MODELS["Deep"]).estimate().parameters
    step = fake_step("Deep", "sim")
    assert step.measure(foreach=False).optimizer_temporary < 1e6
    assert fake_step("Deep", "cpu").measure().optimizer_temporary < 1e6


def test_gradients_lie_in_the_forward_where_a_hook_forbids_to_clear_them() -> None:
    class Late(memory_models.Deep):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            """Called between forward and backward."""

    model = Late()
    batch = model.batch(4)
    late = FakeStep(model, [model.configure_optimizers()], batch, device_type="cpu").measure()
    early = FakeStep(model := memory_models.Deep(), [model.configure_optimizers()], batch, device_type="cpu").measure()
    assert late.peak("forward") - early.peak("forward") == early.gradients


def test_whatever_the_step_is_given_stays_as_it_is() -> None:
    class Drawing(memory_models.Conv):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch[0].mul_(2)
            self.seen.append(torch.rand(3))
            return super().training_step(batch, batch_idx)

    model = Drawing()
    optimizer = model.configure_optimizers()
    x, y = batch = model.batch(4)
    before = ({name: value.clone() for name, value in model.state_dict().items()}, x.clone(), rng.collect_host())
    FakeStep(model, [optimizer], batch, device_type="cpu").measure(prepare=lambda module: module.add_module("a", None))
    assert not rng.drawn_between(before[2], rng.collect_host())
    assert torch.equal(batch[0], before[1]) and batch[1] is y
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert all(type(p) is nn.Parameter and p.grad is None and not p._backward_hooks for p in model.parameters())
    assert not optimizer.state and not model.seen and "log" not in vars(model) and not hasattr(model, "a")
    assert optimizer.param_groups[0]["foreach"] is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_no_values_are_copied() -> None:
    """A model of a tebibyte on the meta device takes a step, of parts of its parameters too."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**19, 2**19, bias=False), nn.ReLU())
    model.training_step = lambda batch, batch_idx: model(batch).sum()
    given = [torch.optim.SGD(model.parameters(), lr=0.1)], torch.zeros(2, 2**19)

    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.inner(batch).sum()

    step = FakeStep(Stepping(), *given, device_type="cpu")
    assert step.measure().parameters == 2**40
    assert step.measure(shape_of=lambda name, parameter: (2**18, 2**19)).parameters == 2**39


def test_ties_modules_called_twice_and_manual_optimization() -> None:
    class Manual(nn.Module):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)
            self.same = nn.Linear(64, 64, bias=False)
            self.same.weight = self.layer.weight

        def optimizers(self) -> Any:
            raise AssertionError("of a run that there is not")

        def manual_backward(self, loss: torch.Tensor) -> None:
            raise AssertionError("of a run that there is not")

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.same(self.layer(self.layer(batch))).sum())
            optimizer.step()

    model = Manual()
    optimizer = torch.optim.Adam(model.parameters())
    found = FakeStep(model, [optimizer], torch.zeros(2, 64), device_type="cpu").measure()
    assert (found.parameters, found.gradients) == (64 * 64 * 4, 64 * 64 * 4)
    assert found.optimizer == 2 * 64 * 64 * 4 + 4, "and a counter, which is on the CPU everywhere"
    assert {moment.phase for moment in found.moments} == {"forward", "backward", "optimizer"}


class Fails(memory_models.Deep):
    """Steps in which a fake tensor has no answer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "lazy":
            self.lazy = nn.LazyLinear(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.kind == "item":
            loss = loss * loss.item()
        if self.kind == "mask":
            loss = loss + batch[0][batch[0] > 0].sum()
        return None if self.kind == "no loss" else loss

    def configure_optimizers(self) -> Any:
        kinds = {"lbfgs": torch.optim.LBFGS, "adafactor": torch.optim.Adafactor}
        return kinds.get(self.kind, torch.optim.SGD)(list(self.layers.parameters()), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("item", "_local_scalar_dense"), ("mask", "DynamicOutputShape"), ("lazy", "no shape"), ("lbfgs", "LBFGS"),
     ("no loss", "no loss"), ("adafactor", "DataDependent")],
)  # fmt: skip
def test_what_can_not_run_so_is_one_error_with_the_reason(kind: str, reason: str) -> None:
    model = Fails(kind)
    step = FakeStep(model, [model.configure_optimizers()], model.batch(4), device_type="cpu")
    with pytest.raises(FakeStepError, match=reason):
        step.measure()


def test_a_device_type_that_torch_lacks_is_an_error_and_not_the_end_of_the_process() -> None:
    with pytest.raises(FakeStepError, match="no device of type 'xpu' here"):
        fake_step("Transformer", "xpu").measure()


@pytest.mark.usefixtures("file")
def test_explain_counts_the_precision(capfd: pytest.CaptureFixture[str]) -> None:
    peaks = {}
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        command = [*COMMAND, "--strategy", "ddp", "--batch", "step_file:batch", "--precision", precision, "--json"]
        assert cli.main(command) == 0
        memory = json.loads(capfd.readouterr().out)["memory"]
        assert memory["strategies"][0]["measured_by"] == "fake step"
        peaks[precision] = memory["strategies"][0]["by_phase"]["forward"]["bytes"]
    assert peaks["bf16-true"] < 0.6 * peaks["32-true"] and peaks["bf16-mixed"] != peaks["32-true"]


def test_a_real_step_finds_the_same(sim: None) -> None:
    from torchhal_simulator.accelerator import SimAccelerator

    def make() -> tuple[nn.Module, list[Any]]:
        model = memory_models.Transformer()
        return model, [model.configure_optimizers()]

    device = torch.device("sim", 0)
    model = sizes(memory_models.Transformer)
    batch = memory_models.Transformer.batch(8)
    before = rng.collect(SimAccelerator(), device)
    real = RealStep(make, model, batch, accelerator=SimAccelerator(), device=device).measure()
    assert not rng.drawn_between(before, rng.collect(SimAccelerator(), device))
    assert real.source == "real step" and "real step" in real.note
    fake = SingleDeviceStrategy().memory_by_phase(fake_step("Transformer", "sim").measure(), model, 1)
    found = SingleDeviceStrategy().memory_by_phase(real, model, 1)
    for name in ("forward", "backward", "optimizer"):
        assert found.phases[name].bytes == pytest.approx(fake.phases[name].bytes, rel=0.02)
    cpu = RealStep(make, model, batch, accelerator=CPUAccelerator(), device=torch.device("cpu"))
    with pytest.raises(FakeStepError, match="keeps no count"):
        cpu.measure()


def test_an_unknown_step_has_no_activations_and_says_so() -> None:
    model = sizes(memory_models.Conv)
    step = unknown_step(model, "it reads values")
    assert not step.is_known
    found = SingleDeviceStrategy().memory_by_phase(step, model, 1)
    assert found.peak == model.estimate().total and "unknown" in found.note and "it reads values" in found.note


class OnlyPerRank(SingleDeviceStrategy):
    """Of another package, and of before phases: half of the state, and messages of 1000 bytes."""

    def memory_per_rank(self, model: ModelMemory, world_size: int) -> MemoryEstimate:
        whole = model.estimate()
        return MemoryEstimate(
            whole.parameters, whole.buffers, whole.gradients // 2, whole.optimizer // 2, temporary=1000
        )


def test_phases_follow_from_an_estimate_per_rank() -> None:
    model = sizes(memory_models.Deep)
    whole = model.estimate()
    moments = (Moment("forward", "", 70, 0), Moment("backward", "", 50, whole.gradients), Moment("optimizer", "", 9, 1))
    step = StepMemory(
        whole.parameters, whole.buffers, whole.gradients, whole.optimizer, 30, moments, optimizer_temporary=500
    )
    found = OnlyPerRank().memory_by_phase(step, model, 2)
    held = whole.parameters + whole.optimizer // 2 + 1000 + 30
    assert found.forward == PhaseMemory(held + 70)
    assert found.backward == PhaseMemory(held + 50 + whole.gradients // 2)
    assert found.optimizer == PhaseMemory(held + whole.gradients // 2 + 250)
    assert "memory_per_rank" in found.note
    assert SingleDeviceStrategy().memory_by_phase(step, model, 1) == phases_of(step, model, whole)


def test_the_phase_that_decides() -> None:
    found = MemoryByPhase(PhaseMemory(3), PhaseMemory(5, "b"), PhaseMemory(4), setup=PhaseMemory(5, "all"), note="n")
    assert (found.peak, found.phase, found.unit) == (5, "backward", "b")
    more = found.plus(2, "m")
    assert (more.peak, more.setup, more.save, more.note) == (7, PhaseMemory(7, "all"), None, "n; m")
    assert more.to_dict()["backward"] == {"bytes": 7, "unit": "b"} and more.to_dict()["phase"] == "backward"


def test_bf16_takes_half_of_the_activations() -> None:
    class Half(Precision):
        def forward_context(self) -> Any:
            return torch.autocast("cpu", torch.bfloat16)

    model = memory_models.Wide()
    given = model, [model.configure_optimizers()], model.batch(512)
    full = FakeStep(*given, device_type="cpu").measure()
    half = FakeStep(*given, device_type="cpu", precision=Half()).measure()
    assert sum(half.saved.values()) < sum(full.saved.values()) + full.parameters // 2
    assert half.results["blocks.0.0"] == full.results["blocks.0.0"] // 2


COMMAND = ["explain", "--accelerator", "cpu", "--devices", "2", "--model", "step_file:Deep"]
FILE = """
from memory_models import Deep
from test_step_memory import Fails
import torch

def item():
    return Fails("item")

def batch():
    return Deep.batch(64)

def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*Deep.batch(64)), 32)

def empty():
    return torch.utils.data.DataLoader([], 2)

def wants(size):
    return Deep.batch(size)

given = Deep.batch(8)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_file.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "step_file", raising=False)


@pytest.mark.usefixtures("file")
def test_explain_with_a_batch(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*COMMAND, "--batch", "step_file:batch", "--memory", "32MiB", "--json"]) == 0
    memory = json.loads(capfd.readouterr().out)["memory"]
    rows = {row["strategy"]: row for row in memory["strategies"] if "by_phase" in row}
    assert (memory["limit"], memory["margin"]) == (32 * 2**20, 0.12)
    assert {row["measured_by"] for row in rows.values()} == {"fake step"}
    for row in rows.values():
        phases = row["by_phase"]
        assert row["fits"] == (phases["peak"] * 1.12 <= 32 * 2**20)
        assert row["missing"] == max(0, round(phases["peak"] * 1.12) - 32 * 2**20)
        assert phases["peak"] >= row["total"]
    assert rows["single_device"]["fits"] and not rows["ddp"]["fits"]
    assert cli.main([*COMMAND, "--batch", "step_file:batch", "--memory", "32MiB"]) == 0
    out = capfd.readouterr().out
    header, *table = out.partition("rank(s):\nstrategy")[2].splitlines()
    assert header.split() == ["forward", "backward", "optimizer", "save", "setup", "peak", "decided", "by", "fits"]
    assert any("MiB missing" in line for line in table) and any(line.endswith(" yes") for line in table)


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(("name", "count"), [("given", 8), ("batch", 64), ("loader", 32)])
def test_a_batch_is_itself_or_the_first_of_a_loader(capfd: pytest.CaptureFixture[str], name: str, count: int) -> None:
    assert cli.main([*COMMAND, "--strategy", "ddp", "--batch", f"step_file:{name}", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["memory"]["batch_bytes"] == 2 * 256 * 4 * count


@pytest.mark.usefixtures("file")
def test_a_step_that_reads_values_is_unknown_on_the_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "--accelerator", "cpu", "--devices", "1", "--model", "step_file:item"]
    assert cli.main([*command, "--strategy", "single_device", "--batch", "step_file:batch", "--memory", "1GB"]) == 0
    out = capfd.readouterr().out
    assert " unknown" in out and "activations are unknown and left out" in out and "keeps no count" in out


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "step_file"], "'--batch' must be 'package.module:name' (got 'step_file')"),
        (["--batch", "step_file:nothing"], "'step_file:nothing' can't be imported"),
        (["--batch", "step_file:empty"], "'step_file:empty' has no batch"),
        (["--batch", "step_file:wants"], "function without arguments"),
        (["--batch", "step_file:batch", "--memory", "80Gi"], "with a unit such as GiB"),
        (["--batch", "step_file:batch", "--memory", "0"], "(got '0')"),
        (["--memory", "1GiB"], "needs a '--batch'"),
    ],
)
def test_bad_options(capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main([*COMMAND, *arguments]) != 0
    assert message in capfd.readouterr().err


@pytest.mark.usefixtures("file")
def test_without_a_batch_activations_are_said_to_be_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(COMMAND) == 0
    assert "without activations, for which a '--batch' is needed" in capfd.readouterr().out
