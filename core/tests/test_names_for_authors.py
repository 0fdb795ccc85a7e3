"""Names that authors of plugins need beside the contracts, and what an engine's author needs of the loops."""

import signal
import warnings

import pytest
import torch

from torchhal import Trainer
from torchhal.checkpoint import apply_map_location, next_ns, seen
from torchhal.cluster import LocalEnvironment, port_from_job_id, read_text
from torchhal.errors import ConfigurationError, ModelError
from torchhal.strategies import SingleDeviceStrategy, StepResult
from torchhal.trainer.loops import extract_loss


class Line(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self(batch), 3 * batch + 1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class OwnsStep(SingleDeviceStrategy):
    features = frozenset({"owns_step"})

    def training_step(self, batch, batch_idx):
        return self.module.training_step(batch, batch_idx).detach()


class OwnsOptimizerStep(SingleDeviceStrategy):
    features = frozenset({"owns_backward"})

    def training_step(self, batch, batch_idx):
        return self.module.training_step(batch, batch_idx).detach()

    def optimizer_step(self, optimizer, closure=None):
        return StepResult.UPDATED


@pytest.mark.parametrize("strategy", [OwnsStep, OwnsOptimizerStep])
def test_schedulers_of_an_engine_do_not_warn_of_the_optimizer_that_it_never_calls(strategy) -> None:
    trainer = Trainer(
        accelerator="cpu", strategy=strategy(), max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        trainer.fit(Line(), [torch.rand(4, 1)])
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**2


def test_extract_loss() -> None:
    loss = torch.ones(1, requires_grad=True).sum()
    assert extract_loss(loss, "Net") is loss
    assert extract_loss({"loss": loss, "more": 1}, "Net") is loss
    assert extract_loss(None, "Net") is None
    with pytest.raises(ModelError, match=r"Net.training_step .*'other'"):
        extract_loss({"other": loss}, "Net")


def test_stop_signals_are_ints_whatever_they_are_set_to() -> None:
    environment = LocalEnvironment()
    environment.stop_signals = [signal.SIGTERM, 12]
    assert [type(one) for one in environment.stop_signals] == [int, int]
    assert environment.stop_signals == (int(signal.SIGTERM), 12)


def test_map_location_of_another_form_is_refused() -> None:
    with pytest.raises(TypeError, match=r"map_location.*got 3"):
        apply_map_location({"w": torch.ones(2)}, 3)


def test_tensors_that_share_memory_still_do_after_a_move() -> None:
    base = torch.arange(4.0)
    moved = apply_map_location({"base": base, "view": base[1:3]}, "meta")
    assert moved["base"].device.type == moved["view"].device.type == "meta"
    moved = apply_map_location({"base": base, "view": base[1:3]}, lambda storage, location: storage)
    moved["base"][1] = 7.0
    assert moved["view"][0] == 7.0


def test_a_save_is_later_than_one_that_was_loaded() -> None:
    ahead = next_ns() + 10**12
    seen(ahead)
    assert next_ns() > ahead


def test_port_of_a_job() -> None:
    assert port_from_job_id("4711", "0") == port_from_job_id("4711", "0") != port_from_job_id("4711", "1")
    assert 12_000 <= port_from_job_id("x") < 32_000


@pytest.mark.parametrize("value", [None, "", "  "])
def test_a_missing_text_is_named(value, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACME_JOB", raising=False)
    if value is not None:
        monkeypatch.setenv("ACME_JOB", value)
    with pytest.raises(ConfigurationError, match=r"ACME_JOB must be set.*acme-run sets it"):
        read_text("ACME_JOB", hint="acme-run sets it")
