"""Arguments of the Trainer that callbacks set while it runs: taken, or refused by name, and never ignored."""

import warnings
from datetime import timedelta

import pytest
import torch
from torch import nn

from torchhal import Callback, Module, Trainer
from torchhal.errors import ConfigurationError
from torchhal.strategies import SingleDeviceStrategy


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.validations = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.validations.append(self.trainer.fit_loop.total_batches)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def rows(count):
    return list(torch.randn(count, 4, 2, generator=torch.Generator().manual_seed(count)))


class Sets(Callback):
    """Sets arguments the ``nth`` time that ``hook`` is called; ``steps`` are those taken after each batch."""

    def __init__(self, hook, nth=1, **values):
        self.left, self.values, self.steps = nth, values, []
        own = getattr(self, hook)

        def act(trainer, *args):
            own(trainer, *args)
            if not trainer.sanity_checking:
                self.left -= 1
            if self.left == 0:
                self.left = -1
                for name, value in self.values.items():
                    setattr(trainer, name, value)

        setattr(self, hook, act)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(trainer.global_step)


def fit(callback, model=None, batches=8, **options):
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, **options},
        callbacks=[callback], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = model or Net()
    trainer.fit(model, rows(batches), rows(2))
    return trainer, model


# -- taken -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "nth", "before", "after", "steps"),
    [
        ("setup", 1, 1, 4, [0, 0, 0, 1, 1, 1, 1, 2]),
        ("on_fit_start", 1, 1, 4, [0, 0, 0, 1, 1, 1, 1, 2]),
        ("on_train_start", 1, 1, 4, [0, 0, 0, 1, 1, 1, 1, 2]),
        ("on_train_epoch_start", 1, 1, 4, [0, 0, 0, 1, 1, 1, 1, 2]),
        ("on_train_epoch_start", 1, 4, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("on_train_batch_start", 1, 1, 4, [0, 0, 0, 1, 1, 1, 1, 2]),
        ("on_train_batch_end", 1, 1, 4, [1, 1, 1, 2, 2, 2, 2, 3]),  # steps end at multiples of it
        ("on_train_batch_end", 2, 4, 2, [0, 0, 0, 1, 1, 2, 2, 3]),  # what has begun to accumulate ends as it began
        ("on_validation_end", 1, 1, 2, [1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12]),
    ],
)
def test_accumulation_is_taken_with_the_next_step(hook, nth, before, after, steps):
    callback = Sets(hook, nth, accumulate_grad_batches=after)
    epochs = len(steps) // 8
    trainer, _ = fit(callback, accumulate_grad_batches=before, max_epochs=epochs)
    assert callback.steps == steps
    assert trainer.accumulate_grad_batches == before, "another fit begins with what the script asked for"


def test_accumulated_step_equals_mean():
    """An accumulated step is one on the mean of all its batches."""
    _, model = fit(Sets("on_train_epoch_start", accumulate_grad_batches=4))
    expected = Net()
    optimizer = expected.configure_optimizers()
    for index, batch in enumerate(rows(8)):
        (expected.training_step(batch, index) / 4).backward()
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_it_is_taken_over_ranks(world2):
    (mine, steps), (theirs, others) = world2.run(fit_in_ranks)
    assert steps == others == [0, 0, 0, 1, 1, 1, 1, 2]
    expected = Net()
    optimizer = expected.configure_optimizers()
    for index, batch in enumerate(rows(8)):
        (expected.training_step(batch, index) / 4).backward()
        if index % 4 == 3:
            nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    for name, wanted in expected.state_dict().items():
        assert torch.equal(mine[name], theirs[name]), name
        torch.testing.assert_close(mine[name], wanted, rtol=1e-6, atol=1e-7)


def fit_in_ranks():
    callback = Sets("on_train_epoch_start", accumulate_grad_batches=4, gradient_clip_val=0.01)
    _, model = fit(callback, devices=2, strategy="ddp")  # a list of batches: each rank has all of it
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}, callback.steps


def test_setting_on_one_rank_refused(world2):
    """A setting that one rank alone changes is an error on all ranks."""
    for outcome in world2.outcomes(clip_on_rank_1):
        assert outcome.error == "ConfigurationError"
        assert "the same gradient_clip_val (rank 0 has None, rank 1 has 0.01)" in outcome.message


def clip_on_rank_1():
    import os

    values = {"gradient_clip_val": 0.01} if os.environ["RANK"] == "1" else {}
    fit(Sets("on_train_batch_end", **values), devices=2, strategy="ddp", max_epochs=2)


def test_accumulation_after_resume(tmp_path):
    """A resumed run accumulates as many batches to a step."""
    trainer, _ = fit(Sets("on_train_batch_end", 4, accumulate_grad_batches=2), max_steps=5)
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    again = Sets("on_train_start")
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=[again],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), rows(8), ckpt_path=tmp_path / "five.ckpt")
    assert again.steps == [5, 6]


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"])
@pytest.mark.parametrize(("before", "after"), [(None, 0.001), (0.001, None), (10.0, 0.001)])
def test_clipping_is_taken(hook, before, after):
    norms = []

    class Looks(Sets):
        def on_before_zero_grad(self, trainer, module, optimizer):
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            if grads:  # those of the step before
                norms.append(torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads])).item())

    trainer, _ = fit(Looks(hook, gradient_clip_val=after), gradient_clip_val=before)
    assert trainer.gradient_clip_val == after
    limited = [norm <= 0.001 * 1.01 for norm in norms]
    assert len(norms) == 7 and (all(limited) if after == 0.001 else not any(limited))


def test_clipping_removed_within_step():
    """Clipping that ends within a step leaves its gradients alone."""
    _, model = fit(Sets("on_after_backward", gradient_clip_val=None), gradient_clip_val=1e-9)
    _, plain = fit(Callback())
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("hook", "nth", "values", "reached"),
    [
        ("on_train_batch_end", 3, {"max_steps": 3}, (3, 0)),
        ("on_train_batch_end", 3, {"max_steps": 5}, (5, 0)),
        ("on_validation_end", 1, {"max_steps": 8}, (8, 1)),
        ("on_train_epoch_end", 1, {"max_epochs": 3}, (24, 3)),
        ("on_train_batch_end", 3, {"max_epochs": 1}, (8, 1)),
        ("on_train_batch_end", 3, {"max_time": timedelta(microseconds=1)}, (3, 0)),
        ("on_train_batch_end", 3, {"min_steps": 6, "max_time": timedelta(microseconds=1)}, (6, 0)),
    ],
)
def test_limits_are_taken_at_once(hook, nth, values, reached):
    trainer, _ = fit(Sets(hook, nth, **values), max_epochs=2)
    assert (trainer.global_step, trainer.current_epoch) == reached


@pytest.mark.parametrize(
    ("hook", "values", "at"),
    [
        ("on_train_batch_end", {"val_check_interval": 4}, [4, 4, 8, 8]),
        ("on_train_epoch_start", {"val_check_interval": 0.5}, [4, 4, 8, 8]),
        ("on_train_batch_end", {"check_val_every_n_epoch": 2}, []),
        ("on_train_batch_end", {"val_check_interval": 3, "check_val_every_n_epoch": None}, [3, 3, 6, 6]),
    ],
)
def test_when_to_validate_is_taken(hook, values, at):
    _, model = fit(Sets(hook, **values))
    assert model.validations == at


def test_settings_between_fits():
    """Settings that are changed between two fits count for the next one."""
    trainer, model = fit(Callback())
    trainer.accumulate_grad_batches, trainer.limit_train_batches = 2, 4
    trainer.max_epochs = 2
    trainer.fit(model, rows(8))
    assert trainer.global_step == 8 + 2


# -- refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accumulate_grad_batches", 0), ("accumulate_grad_batches", "4"), ("gradient_clip_val", -1.0),
        ("gradient_clip_algorithm", "Norm"), ("max_epochs", 1.5), ("max_steps", None), ("limit_val_batches", 1.5),
        ("val_check_interval", 0), ("log_every_n_steps", -1), ("max_time", "soon"), ("inference_mode", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("running", [False, True])
def test_setting_out_of_domain(name, value, running):
    """A value out of its domain is refused where it is set."""
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        if running:
            fit(Sets("on_train_batch_end", **{name: value}))
        else:
            trainer, _ = fit(Callback())
            setattr(trainer, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit_train_batches", 2), ("limit_train_batches", 1), ("limit_val_batches", 0), ("overfit_batches", 1),
        ("num_sanity_val_steps", 0), ("use_distributed_sampler", False), ("detect_anomaly", True),
        ("deterministic", True), ("benchmark", True),
    ],
)  # fmt: skip
def test_late_settings_refused(name, value):
    """A setting that comes too late is refused, and taken in the setup hook."""
    with pytest.raises(ConfigurationError, match=rf"'{name}' can't become {value} any more: fit has begun.*setup hook"):
        fit(Sets("on_train_start", **{name: value}))
    if name != "deterministic":  # which chooses algorithms
        trainer, _ = fit(Sets("setup", **{name: value}))
        assert getattr(trainer, name) == value
        if name == "limit_train_batches":
            assert trainer.global_step == value


def test_limits_of_an_evaluation_are_refused_in_it():
    class Late(Callback):
        def on_test_start(self, trainer, module):
            trainer.limit_val_batches = 1  # that of another evaluation
            trainer.limit_test_batches = 1

    trainer, model = fit(Callback())
    trainer.callbacks = [Late()]
    with pytest.raises(ConfigurationError, match="'limit_test_batches' can't become 1 any more: test has begun"):
        trainer.test(model, rows(2), verbose=False)
    assert trainer.limit_val_batches == 1


@pytest.mark.parametrize(("name", "value"), [("fast_dev_run", True), ("default_root_dir", "elsewhere")])
def test_what_made_the_trainer_is_refused_always(name, value):
    trainer, _ = fit(Callback())
    with pytest.raises(ConfigurationError, match=rf"'{name}' can't become .* any more: the Trainer was made with"):
        setattr(trainer, name, value)


@pytest.mark.parametrize("name", ["strategy", "num_nodes", "accelerator", "precision"])
def test_what_the_constructor_has_decided_is_refused(name):
    trainer, _ = fit(Callback())
    with pytest.raises(ConfigurationError, match=rf"'{name}'.* new one"):
        setattr(trainer, name, 2)


def test_a_name_that_is_no_setting_is_said():
    trainer, _ = fit(Callback())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.experiment = trainer.max_gap = "mine"
    for name, advice in (
        ("acumulate_grad_batches", "did you mean 'accumulate_grad_batches'"),
        ("max_epoch", "did you mean 'max_epochs'"),
        ("devices", "pass it to a new one"), ("enable_progress_bar", "pass it to a new one"),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match=rf"no setting '{name}'.*{advice}"):
            setattr(trainer, name, 4)
        assert getattr(trainer, name) == 4


def test_contradictions_are_refused():
    trainer, _ = fit(Callback(), min_epochs=1)
    with pytest.raises(ConfigurationError, match="'min_epochs' must be at most 'max_epochs'"):
        trainer.max_epochs = 0
    with pytest.raises(ConfigurationError, match="'min_epochs' must be at most 'max_epochs'"):
        trainer.min_epochs = 2
    with pytest.raises(ConfigurationError, match="'val_check_interval' must be a number of batches"):
        trainer.check_val_every_n_epoch = None
    assert (trainer.max_epochs, trainer.min_epochs, trainer.check_val_every_n_epoch) == (1, 1, 1)


@pytest.mark.parametrize(
    "values", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"gradient_clip_algorithm": "value"}]
)
def test_a_model_that_optimizes_by_hand_refuses_them(values):
    with pytest.raises(ConfigurationError, match=r"for a model with manual optimization.*ByHand\.training_step"):
        fit(Sets("on_train_epoch_start", **values), ByHand())


def test_an_optimizer_with_a_closure_refuses_accumulation():
    class Searches(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1)

    with pytest.raises(ConfigurationError, match="'accumulate_grad_batches' must be 1 for an optimizer that evaluates"):
        fit(Sets("on_train_epoch_start", accumulate_grad_batches=2), Searches())


class Owns(SingleDeviceStrategy):
    """As an engine that clips and accumulates by itself, with the numbers of its set-up."""

    features = frozenset({"owns_accumulation", "owns_clipping"})


@pytest.mark.parametrize(
    "values",
    [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"gradient_clip_algorithm": "value"}],
)
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_epoch_start", "on_train_batch_end"])
def test_engine_refuses_late_settings(hook, values):
    """An engine that has begun with other settings refuses new ones."""
    with pytest.raises(ConfigurationError, match=r"can't become .*: strategy 'Owns' has set up its steps with"):
        fit(Sets(hook, **values), strategy=Owns())
    strategy = Owns()
    fit(Sets("setup", **values), strategy=strategy)
    assert all(getattr(strategy, name) == value for name, value in values.items()), "before it is set up"


def test_strategy_checks_accumulation():
    """A strategy may refuse a number of accumulated batches."""

    class One(SingleDeviceStrategy):
        def check_accumulation(self, batches):
            raise ConfigurationError(f"one batch, not {batches}")

    with pytest.raises(ConfigurationError, match="one batch, not 2"):
        fit(Sets("on_train_epoch_start", accumulate_grad_batches=2), strategy=One())
