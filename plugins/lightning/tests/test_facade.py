"""What libraries expect of a Trainer with Lightning's signature beside the training itself."""

import copy

import pytest
import torch
from lightning_models import dataset, fit, made, models, same
from torch.utils.data import DataLoader

import torchhal
from torchhal.errors import ConfigurationError, ModelError
from torchhal_lightning import Trainer

OPTIONS = {"accelerator": "cpu", "devices": 1, "logger": False}


def of_tree(pl):
    """Return the Trainer whose default parts come from ``pl``."""
    return type("Trainer", (Trainer,), {"tree": pl.__name__})


def test_errors_are_lightnings_too(pl):
    theirs = pl.utilities.exceptions.MisconfigurationException
    for argument, value in (("max_epochs", "many"), ("strategy", pl.strategies.ModelParallelStrategy())):
        with pytest.raises(theirs) as caught:
            Trainer(**OPTIONS, **{argument: value})
        assert isinstance(caught.value, ConfigurationError) and type(caught.value).__name__ == "ConfigurationError"
    with pytest.raises(theirs) as caught:
        Trainer(**OPTIONS).fit(made(models(pl)["Plain"]))
    assert isinstance(caught.value, ModelError)
    with pytest.raises(ConfigurationError) as caught:
        torchhal.Trainer(**OPTIONS, max_epochs="many")
    assert not isinstance(caught.value, theirs)


def test_the_default_callbacks(pl):
    callbacks = pl.callbacks
    kinds = (callbacks.ModelCheckpoint, callbacks.ProgressBar, callbacks.ModelSummary)
    Trainer = of_tree(pl)
    trainer = Trainer(**OPTIONS)
    assert [sum(isinstance(each, kind) for each in trainer.callbacks) for kind in kinds] == [1, 1, 1]
    assert isinstance(trainer.progress_bar_callback, torchhal.ProgressBar)
    trainer = Trainer(**OPTIONS, callbacks=callbacks.RichProgressBar())
    assert any(isinstance(each, callbacks.RichModelSummary) for each in trainer.callbacks)
    assert [type(each).__name__ for each in trainer.callbacks].count("ProgressBar") == 0
    off = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    assert not [each for each in Trainer(**OPTIONS, **off).callbacks if isinstance(each, kinds)]
    with pytest.raises(ConfigurationError, match=r"multiple progress bar callbacks .*TQDMProgressBar, TQDMProgressBar"):
        Trainer(**OPTIONS, callbacks=[callbacks.TQDMProgressBar(), callbacks.TQDMProgressBar()])
    for name, callback in (
        ("progress_bar", callbacks.TQDMProgressBar()),
        ("checkpointing", callbacks.ModelCheckpoint()),
    ):
        with pytest.raises(ConfigurationError, match=rf"`enable_{name}=False` but found `{type(callback).__name__}`"):
            Trainer(**OPTIONS, callbacks=callback, **{f"enable_{name}": False})


def test_the_bar_knows_what_lightnings_bars_know(pl):
    module = made(models(pl)["Plain"])
    trainer = fit(Trainer, module, enable_progress_bar=True, max_epochs=1)
    bar = trainer.progress_bar_callback
    assert bar.get_metrics(trainer, module)["train_loss_epoch"] == pytest.approx(
        float(trainer.callback_metrics["train_loss_epoch"])
    )
    assert bar.total_train_batches == 6
    again = copy.deepcopy(bar)
    assert type(again) is type(bar) and again.is_enabled


def test_variables_are_defaults(monkeypatch, pl):
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "7")
    monkeypatch.setenv("PL_TRAINER_LOGGER", "False")
    monkeypatch.setenv("PL_TRAINER_PRECISION", "bf16-mixed")
    trainer = Trainer(accelerator="cpu")
    assert (trainer.max_steps, trainer.logger, trainer.precision) == (7, None, "bf16-mixed")
    assert Trainer(accelerator="cpu", max_steps=3).max_steps == 3


def test_epochs_are_undecided_until_a_call(pl):
    trainer = Trainer(**OPTIONS, enable_checkpointing=False)
    assert trainer.max_epochs is None
    trainer.validate(made(models(pl)["Plain"]), DataLoader(dataset(8), 8), verbose=False)
    assert trainer.max_epochs == 1000


def test_barebones_refuses_what_it_switches_off(pl):
    quiet = {"accelerator": "cpu", "devices": 1, "barebones": True}
    trainer = Trainer(**quiet)
    assert trainer.barebones and trainer.logger is None and not trainer.num_sanity_val_steps
    for name, value in (("logger", True), ("detect_anomaly", True), ("profiler", "simple"), ("log_every_n_steps", 3)):
        with pytest.raises(ValueError, match=rf"barebones=True, {name}={value!r}"):
            Trainer(**{**quiet, name: value})


def test_a_strategy_from_lightnings_registry(pl):
    registry = pl.strategies.StrategyRegistry
    registry.register("ddp_of_ours", pl.strategies.DDPStrategy, static_graph=True)
    try:
        trainer = of_tree(pl)(accelerator="cpu", devices=2, logger=False, strategy="ddp_of_ours")
        assert trainer.strategy.static_graph
    finally:
        registry.remove("ddp_of_ours")


def test_a_fast_run_has_a_logger_that_takes_everything(pl):
    class Draws(models(pl)["Plain"]):
        def on_train_epoch_end(self):
            self.logger.experiment.add_figure("a", None)

    fit(Trainer, made(Draws), fast_dev_run=True, logger=True, enable_checkpointing=None)


def test_an_exception_leaves_its_checkpoint(pl, tmp_path):
    """Lightning calls no teardown after an error, and this callback's removes what it has saved."""

    class Fails(models(pl)["Plain"]):
        fails = True

        def training_step(self, batch, batch_idx):
            if self.fails and self.global_step == 4:
                raise RuntimeError("here")
            return super().training_step(batch, batch_idx)

    saver = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="here"):
        fit(Trainer, made(Fails), callbacks=[saver], enable_checkpointing=True)
    assert (tmp_path / "on_exception.ckpt").exists()
    Fails.fails = False
    trainer = Trainer(**OPTIONS, max_epochs=2, callbacks=[saver])
    trainer.fit(made(Fails), DataLoader(dataset(), 8), ckpt_path=saver.ckpt_path)
    assert trainer.global_step == 12 and not (tmp_path / "on_exception.ckpt").exists()


@pytest.mark.parametrize("trainer_of", [torchhal.Trainer, Trainer])
def test_each_module_trains_in_the_mode_that_it_has(pl, trainer_of):
    """A frozen part in evaluation mode stays in it, as under Lightning since 2.2."""

    class Frozen(models(pl)["Plain"]):
        seen: set = set()

        def __init__(self):
            super().__init__()
            self.body[2].eval()

        def training_step(self, batch, batch_idx):
            self.seen.add((self.training, self.body[0].training, self.body[2].training))
            return super().training_step(batch, batch_idx)

    fit(trainer_of, made(Frozen))
    assert Frozen.seen == {(True, True, False)}


def test_a_step_that_forgets_its_closure(pl):
    class Forgets(models(pl)["Plain"]):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure): ...

    with pytest.raises(ModelError, match=r"Forgets\.optimizer_step has not used the batch: call optimizer\.step"):
        fit(Trainer, made(Forgets))


def test_batches_that_a_step_draws_itself(pl):
    class Draws(models(pl)["Plain"]):
        def training_step(self, dataloader_iter):
            batch, batch_idx, dataloader_idx = next(dataloader_iter)
            loss = self.loss(batch)
            self.note("train", batch_idx, dataloader_idx, loss)
            self.log("train_loss", loss, batch_size=8)
            return loss

        def validation_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            self.note("val", batch_idx, self.loss(batch))

    class DrawsTwo(Draws):
        def training_step(self, dataloader_iter):
            next(dataloader_iter)
            return super().training_step(dataloader_iter)

    theirs, mine = made(Draws), made(Draws)
    fit(pl.Trainer, theirs)
    fit(Trainer, mine)
    same(mine, theirs)
    assert "training_step" not in vars(mine)
    with pytest.raises(ModelError, match=r"DrawsTwo\.training_step draws a second batch"):
        fit(Trainer, made(DrawsTwo))


def test_the_loss_of_an_accumulation_is_a_share(pl):
    class Watches(models(pl)["Plain"]):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.note("outputs", outputs["loss"])

    theirs, mine = made(Watches), made(Watches)
    for trainer_of, module in ((pl.Trainer, theirs), (Trainer, mine)):
        fit(trainer_of, module, accumulate_grad_batches=3)
    found = [[note for note in each.notes if note[0] == "outputs"] for each in (theirs, mine)]
    assert found[0] == found[1]


def test_views_pass_for_lightnings_parts(pl):
    options = {**OPTIONS, "enable_checkpointing": False}
    trainer = of_tree(pl)(**options, precision="bf16-mixed", gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert isinstance(trainer.accelerator, pl.accelerators.CPUAccelerator)
    assert isinstance(trainer.precision_plugin, pl.plugins.MixedPrecision)
    assert not isinstance(trainer.precision_plugin, pl.plugins.DoublePrecision)
    assert trainer.gradient_clip_algorithm == "value" and trainer.gradient_clip_algorithm.value == "value"
    assert isinstance(trainer.profiler, pl.profilers.PassThroughProfiler)


def test_the_folder_of_logs_is_the_loggers(pl, tmp_path):
    for logger in (pl.loggers.CSVLogger(tmp_path), pl.loggers.TensorBoardLogger(tmp_path)):
        trainer = Trainer(accelerator="cpu", logger=logger, default_root_dir=tmp_path / "other")
        assert trainer.log_dir == logger.log_dir
    assert Trainer(**OPTIONS, default_root_dir=tmp_path / "other").log_dir == str(tmp_path / "other")


def test_a_profiler(pl, tmp_path):
    profiler = pl.profilers.SimpleProfiler(tmp_path, "times")
    module = made(models(pl)["OwnHooks"])
    fit(Trainer, module, profiler=profiler, callbacks=[pl.callbacks.EarlyStopping("val_loss")], max_epochs=2)
    counted = {name: len(times) for name, times in profiler.recorded_durations.items()}
    assert counted["[Strategy]SingleDeviceStrategy.training_step"] == 12 == counted["run_training_batch"]
    assert counted["run_training_epoch"] == 2
    assert any(name.startswith("[Callback]EarlyStopping") for name in counted)
    (report,) = tmp_path.glob("fit-times*.txt")
    assert "run_training_batch" in report.read_text()
    with pytest.raises(ConfigurationError, match=r"`profiler`.*\['advanced', 'pytorch', 'simple', 'xla'\]"):
        Trainer(**OPTIONS, profiler="stopwatch")


@pytest.mark.parametrize("word", ["advanced", "pytorch"])
def test_profilers_by_their_words(pl, tmp_path, word):
    trainer = fit(Trainer, made(models(pl)["Plain"]), profiler=word, max_epochs=1, default_root_dir=tmp_path)
    assert type(trainer.profiler).__name__.lower().startswith(word)


def test_hyperparameters_are_logged_or_not(pl, tmp_path):
    for chosen in (True, False):
        logger = pl.loggers.CSVLogger(tmp_path / str(chosen))
        module = made(models(pl)["Plain"])
        fit(Trainer, module, logger=logger, enable_autolog_hparams=chosen, max_epochs=1)
        assert bool(logger.experiment.hparams) is chosen and module._log_hyperparams


def test_a_hook_that_lightning_has_removed_is_a_warning(pl):
    """Published classes still have some; those that got an epoch's outputs are refused, as by Lightning."""

    class Left(models(pl)["Plain"]):
        def on_epoch_end(self, outputs): ...

    with pytest.warns(UserWarning, match=r"Left\.on_epoch_end is no hook any more"):
        fit(torchhal.Trainer, made(Left), max_epochs=1)

    class Gathers(models(pl)["Plain"]):
        def training_epoch_end(self, outputs): ...

    with pytest.raises(ModelError, match=r"Gathers\.training_epoch_end is no hook any more"):
        fit(torchhal.Trainer, made(Gathers), max_epochs=1)


def test_a_module_made_in_the_precision(pl):
    trainer = of_tree(pl)(**{**OPTIONS, "precision": "bf16-true"})
    with trainer.init_module():
        module = made(models(pl)["Plain"])
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}


def test_a_profiler_that_fails_leaves_the_module_as_it_was(pl):
    class Breaks(pl.profilers.SimpleProfiler):
        def describe(self):
            raise OSError("no space")

    class Draws(models(pl)["Plain"]):
        def training_step(self, dataloader_iter):
            return self.loss(next(dataloader_iter)[0])

    module = made(Draws)
    module.on_validation_model_zero_grad = own = lambda: None
    fit(Trainer, module, profiler=Breaks())
    assert not {"training_step", "log", "on_validation_model_eval"} & vars(module).keys()
    assert module.on_validation_model_zero_grad is own


def test_the_graph_of_a_model(pl, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Shown(models(pl)["Plain"]):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.randn(2, 6)

        def forward(self, inputs):
            return self.body(inputs)

    logger = pl.loggers.TensorBoardLogger(tmp_path, log_graph=True)
    fit(Trainer, made(Shown), logger=logger, max_epochs=1)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert events.Tags()["graph"]
