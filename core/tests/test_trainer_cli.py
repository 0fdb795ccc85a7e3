"""TrainerCLI: options and files become a Trainer, a model and a data module; what is wrong is said in a line."""

import json
import os
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import pytest
import torch
from limits import scaled

from torchhal import Module, Trainer
from torchhal.errors import CheckpointMismatchError, ConfigurationError, UnknownAliasError
from torchhal.trainer.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, Timer
from torchhal.trainer.loggers import CSVLogger

pytest.importorskip("jsonargparse")

from cli_models import Data, DeepEncoder, Encoder, Net, OptimizerNet, SavingNet, StopEarly

from torchhal import TrainerCLI
from torchhal.trainer_cli import ReduceLROnPlateau
from torchhal.trainer_cli._config_file import write_new

SCRIPT = Path(__file__).parent / "scripts" / "cli_train.py"
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHHAL_SEED", raising=False)


def make(model=Net, data=Data, **options):
    defaults = {**QUIET, "fast_dev_run": 1, **options.pop("trainer_defaults", {})}
    return TrainerCLI(model, data, trainer_defaults=defaults, **options)


@pytest.fixture(scope="module")
def cli():
    return make()


def callback(cli, cls):
    return next((each for each in cli.trainer.callbacks if type(each) is cls), None)


def write(name, text):
    Path(name).write_text(text)
    return f"--config={name}"


# -- values ----------------------------------------------------------------------------------------------------


def test_options_reach_model_data_and_trainer(cli):
    cli.run(["fit", "--model.lr", "0.5", "--data.batch_size=8", "--trainer.accumulate_grad_batches=2"])
    assert (cli.model.lr, cli.datamodule.batch_size, cli.trainer.accumulate_grad_batches) == (0.5, 8, 2)
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.5 and cli.trainer.global_step == 1
    assert cli.subcommand == "fit"


def test_later_files_count_more_and_options_most(cli):
    first = write("a.yaml", "model: {lr: 0.1, classes: 3}\ndata: {classes: 3}\ntrainer: {precision: bf16-true}\n")
    second = write("b.yaml", "model: {lr: 0.2}\n")
    cli.run(["fit", first, second, "--trainer.precision=32-true"])
    assert (cli.model.lr, cli.model.head.out_features, cli.trainer.precision) == (0.2, 3, "32-true")


def test_a_file_with_every_subcommand(cli):
    whole = write("c.yaml", "fit: {model: {lr: 0.3}}\nvalidate: {model: {lr: 0.4}}\n")
    for name, lr in (("fit", 0.3), ("validate", 0.4)):
        cli.run([whole, name])
        assert cli.model.lr == lr


def test_default_files_come_first():
    write("defaults.yaml", "model: {lr: 0.1, classes: 4}\n")
    cli = make(default_config_files=["defaults.yaml", "absent.yaml"])
    cli.run(["fit", "--model.lr=0.2"])
    assert (cli.model.lr, cli.model.head.out_features) == (0.2, 4)


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_evaluations_return_what_the_trainer_does(cli, name):
    result = cli.run([name])
    if name == "predict":
        assert result[0].shape == (4, 2)
        assert cli.run(["predict", "--return_predictions=false"]) is None
    else:
        assert result[0].keys() == {"val_loss" if name == "validate" else "test_loss"}


def test_ckpt_path_is_passed_on(cli, tmp_path):
    fit = make(trainer_defaults={"fast_dev_run": False, "logger": False})
    fit.run(["fit"])
    (path,) = tmp_path.glob("checkpoints/*.ckpt")
    cli.run(["validate", f"--ckpt_path={path}", "--seed_everything=9"])
    for found, expected in zip(cli.model.parameters(), fit.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("option", "kind"),
    [("Encoder", Encoder), ("cli_models.DeepEncoder", DeepEncoder), ("{class_path: DeepEncoder}", DeepEncoder)],
)
def test_a_class_among_subclasses(cli, option, kind):
    cli.run(["fit", f"--model.encoder={option}", "--model.encoder.width=5"])
    assert type(cli.model.encoder) is kind and cli.model.head.in_features == 5


def test_arguments_of_a_class(cli):
    cli.run(["fit", "--model.encoder=DeepEncoder", "--model.encoder.depth=3"])
    assert len(cli.model.encoder.layers) == 3


def test_a_model_of_any_class():
    cli = make(Module, None, subclass_mode_model=True)
    cli.run(["fit", "--model=cli_models.Net", "--model.lr=0.25", "--data=cli_models.Data", "--data.batch_size=2"])
    assert (type(cli.model), cli.model.lr, cli.datamodule.batch_size) == (Net, 0.25, 2)


def test_a_model_with_its_own_data():
    class WithData(Net):
        def train_dataloader(self):
            return Data().loader()

    cli = make(WithData, None)
    cli.run(["fit"])
    assert cli.datamodule is None and cli.trainer.global_step == 1


def test_instantiate_needs_no_subcommand(cli):
    trainer, model, data = cli.instantiate(["--model.lr=0.125", "--trainer.max_epochs=3"])
    assert (type(trainer), model.lr, type(data), cli.subcommand) == (Trainer, 0.125, Data, None)


# -- the Trainer's arguments -----------------------------------------------------------------------------------


def test_every_argument_of_the_trainer_has_a_type():
    hints = typing.get_type_hints(Trainer.__init__)
    hints.pop("return")
    assert [name for name, hint in hints.items() if hint is typing.Any] == []


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_every_option_of_the_trainer_has_help(cli, name):
    (subcommands,) = (action.choices for action in cli.parser._actions if isinstance(action.choices, dict))
    options = [action for action in subcommands[name]._actions if action.option_strings]
    assert [each.dest for each in options if not each.help and not each.dest.startswith(("model", "data"))] == []


CALLBACKS = {
    "a class with options": (["--trainer.callbacks=torchhal.EarlyStopping", "--trainer.callbacks.monitor=x"], 1),
    "by its short name": (["--trainer.callbacks=StopEarly", "--trainer.callbacks.monitor=x"], 1),
    "appended": (["--trainer.callbacks+=torchhal.EarlyStopping", "--trainer.callbacks.monitor=x"], 1),
    "a list": (["--trainer.callbacks=[{class_path: torchhal.EarlyStopping, init_args: {monitor: x}}, ema]"], 2),
    "aliases": (["--trainer.callbacks=ema"], 1),
    "aliases with options": (['--trainer.callbacks=[{early_stopping: {monitor: x}}, {ema: {decay: 0.5}}]'], 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLBACKS)
def test_callbacks(cli, case):
    options, count = CALLBACKS[case]
    cli.run(["fit", *options])
    chosen = [each for each in cli.trainer.callbacks if isinstance(each, EarlyStopping | EMAWeightAveraging)]
    assert len(chosen) == count
    if stopping := callback(cli, EarlyStopping) or callback(cli, StopEarly):
        assert stopping.monitor == "x"


def test_callbacks_of_a_file(cli):
    cli.run(["fit", write("c.yaml", """
trainer:
  callbacks:
  - class_path: torchhal.EarlyStopping
    init_args: {monitor: x, patience: 7}
  - timer: {duration: "00:01:00:00"}
  - ema
""")])  # fmt: skip
    assert callback(cli, EarlyStopping).patience == 7
    assert callback(cli, Timer) and callback(cli, EMAWeightAveraging)


@pytest.mark.parametrize(
    ("option", "found"),
    [("strategy=ddp", "ddp"), ("strategy={ddp: {static_graph: true}}", "ddp"), ("strategy=DDPStrategy", "DDPStrategy")],
)
def test_a_strategy(cli, option, found):
    trainer, _, _ = cli.instantiate([f"--trainer.{option}", "--trainer.devices=1"])
    assert type(trainer.strategy).__name__ == "DDPStrategy"
    assert trainer.strategy.static_graph is ("static_graph" in option)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("logger=false", 0),
        ("logger=csv", 1),
        ("logger={csv: {name: mine}}", 1),
        ("logger=[csv, {csv: {name: mine}}]", 2),
        ("logger={class_path: torchhal.trainer.loggers.CSVLogger, init_args: {name: mine}}", 1),
    ],
)
def test_a_logger(option, expected):
    trainer, _, _ = make(trainer_defaults={"fast_dev_run": False}).instantiate([f"--trainer.{option}"])
    assert [type(logger) for logger in trainer.loggers] == [CSVLogger] * expected
    assert not expected or trainer.loggers[-1].name == ("mine" if "mine" in option else "torchhal_logs")


@pytest.mark.parametrize(
    ("option", "name", "expected"),
    [
        ("devices=2", "num_devices", 2),
        ("devices=0,1", "num_devices", 2),
        ("devices=[0, 1]", "num_devices", 2),
        ("precision=bf16-mixed", "precision", "bf16-mixed"),
        ("precision=16", "precision", "16-mixed"),
        ("plugins=[bf16-true]", "precision", "bf16-true"),
        ("limit_train_batches=0.5", "limit_train_batches", 0.5),
        ("limit_train_batches=5", "limit_train_batches", 5),
        ("check_val_every_n_epoch=null", "check_val_every_n_epoch", None),
        ("deterministic=warn", "deterministic", "warn"),
        ("deterministic=false", "deterministic", False),
    ],
)
def test_a_value(option, name, expected):
    cli = make(trainer_defaults={"fast_dev_run": False, "val_check_interval": 3})
    trainer, _, _ = cli.instantiate([f"--trainer.{option}", "--seed_everything=false"])
    found = getattr(trainer, name)
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("option", ["max_time={hours: 1.5}", "max_time=00:01:30:00"])
def test_a_duration(option):
    trainer, _, _ = make(trainer_defaults={"fast_dev_run": False}).instantiate([f"--trainer.{option}"])
    assert trainer.max_time.total_seconds() == 5400


def test_default_callbacks_are_added():
    cli = make(trainer_defaults={"callbacks": EarlyStopping("x")})
    cli.run(["fit", "--trainer.callbacks=ema"])
    assert callback(cli, EarlyStopping) and callback(cli, EMAWeightAveraging)


# -- optimizers ------------------------------------------------------------------------------------------------


def test_an_optimizer_and_its_scheduler(cli):
    cli.run(
        ["fit", "--optimizer=Adam", "--optimizer.lr=0.25", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1",
         "--lr_scheduler.gamma=0.5"]
    )  # fmt: skip
    assert type(cli.trainer.optimizers[0]) is torch.optim.Adam
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.125


def test_a_scheduler_that_follows_a_metric(cli):
    name = "torchhal.trainer_cli.ReduceLROnPlateau"
    cli.run(
        ["fit", "--optimizer=SGD", "--optimizer.lr=0.1", f"--lr_scheduler={name}", "--lr_scheduler.monitor=val_loss"]
    )
    (config,) = cli.trainer.lr_scheduler_configs
    assert type(config.scheduler) is ReduceLROnPlateau and config.monitor == "val_loss"


def test_an_optimizer_as_an_argument_of_the_model():
    cli = make(OptimizerNet)
    cli.run(["fit", "--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=0.5"])
    assert (
        type(cli.trainer.optimizers[0]) is torch.optim.AdamW and cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    )


# -- links -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["parse", "instantiate"])
def test_linked_arguments(when):
    class Linked(TrainerCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.classes", "model.classes", apply_on=when)

    cli = Linked(Net, Data, trainer_defaults={**QUIET, "fast_dev_run": 1})
    cli.run(["fit", "--data.classes=3"])
    assert cli.model.head.out_features == 3
    with pytest.raises(ConfigurationError, match="classes"):
        cli.run(["fit", "--model.classes=3"])


# -- wrong input -----------------------------------------------------------------------------------------------

WRONG = {
    "a prefix": (
        ["--trainer.max_epoch=3"],
        "there is no option '--trainer.max_epoch'; did you mean '--trainer.max_epochs'?",
    ),
    "an unknown option": (["--modle.lr=3"], "there is no option '--modle.lr'; did you mean '--model.lr'?"),
    "a type": (["--trainer.max_epochs=many"], "trainer.max_epochs: must be int or null (got 'many')"),
    "a type of the model's": (["--model.lr=high"], "model.lr: must be float (got 'high')"),
    "an argument of a class": (
        ["--model.encoder=DeepEncoder", "--model.encoder.deph=3"],
        "model.encoder: cli_models.DeepEncoder: there is no option 'deph'; did you mean 'depth'?",
    ),
    "a module that isn't there": (
        ["--model.encoder=nowhere.Encoder"],
        "model.encoder: nowhere.Encoder: No module named 'nowhere'",
    ),
    "a class that isn't there": (
        ["--model.encoder=cli_models.Encodr"],
        "model.encoder: cli_models.Encodr: module 'cli_models' has no attribute 'Encodr'",
    ),
    "a short name": (["--optimizer=Adm"], "optimizer: must be a class or null (got 'Adm'); did you mean 'Adam'?"),
    "a class of another kind": (
        ["--model.encoder=torch.nn.Linear"],
        "model.encoder: must be Encoder or null (got 'torch.nn.Linear')",
    ),
    "a missing argument": (
        ["--trainer.callbacks=StopEarly"],
        "trainer.callbacks: cli_models.StopEarly: monitor must be given",
    ),
    "a callback that isn't there": (
        ["--trainer.callbacks=torchhal.EarlyStoping"],
        "trainer.callbacks: 'torchhal.EarlyStoping' can't be imported: torchhal has no EarlyStoping; "
        "did you mean 'EarlyStopping'?",
    ),
    "an argument of a callback": (
        ["--trainer.callbacks=[{class_path: torchhal.EarlyStopping, init_args: {monitr: x}}]"],
        "trainer.callbacks: torchhal.EarlyStopping: there is no option 'monitr'; did you mean 'monitor'?",
    ),
    "a bracket": (["--trainer.callbacks=[ema"], "trainer.callbacks: no YAML: "),
    "a value out of its domain": (["--trainer.max_epochs=-3"], "'max_epochs' must be an int of at least 0"),
    "a scheduler alone": (
        ["--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"],
        "'lr_scheduler' is the scheduler of 'optimizer', which is missing",
    ),
    "a file that isn't there": (["--config=absent.yaml"], "config: File does not exist: "),
    "a method's argument": (["--ckpt_paht=x"], "there is no option '--ckpt_paht'; did you mean '--ckpt_path'?"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(cli, case):
    options, expected = WRONG[case]
    with pytest.raises(ConfigurationError) as caught:
        cli.run(["fit", *options])
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


MISSPELT = {
    "trainer: {max_epoch: 3}": ("trainer.max_epoch", "trainer.max_epochs"),
    "trainr: {max_epochs: 3}": ("trainr.max_epochs", "trainer.max_epochs"),
    "model: {l: 3}": ("model.l", "model.lr"),
}
WRONG_FILES = {
    **{text: f"there is no option {name!r}; did you mean {near!r}?" for text, (name, near) in MISSPELT.items()},
    "model: {lr: high}": "model.lr: must be float (got 'high')",
    "- 3": "must be a dict of options",
    "model: [3": "no YAML: ",
    "trainer: {callbacks: [{class_path: torchhal.EarlyStopping, init_args: {monitor: x, patience: much}}]}": (
        "trainer.callbacks: torchhal.EarlyStopping: patience: must be int (got 'much')"
    ),
    "trainer: {callbacks: [{class_path: nowhere.Stopping}]}": (
        "trainer.callbacks: nowhere.Stopping: No module named 'nowhere'"
    ),
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_what_is_wrong_in_a_file(cli, text):
    with pytest.raises(ConfigurationError) as caught:
        cli.run(["fit", write("c.yaml", text)])
    assert str(caught.value).startswith(f"c.yaml: {WRONG_FILES[text]}") and "\n" not in str(caught.value)


def test_a_number_in_the_place_of_options(cli):
    with pytest.raises(ConfigurationError, match=r"trainer: must be a dict of options \(got 3\)"):
        cli.run(["fit", write("c.yaml", "trainer: 3")])


def test_unknown_aliases_are_the_trainers_to_explain(cli):
    with pytest.raises(UnknownAliasError, match="did you mean 'zero3'"):
        cli.run(["fit", "--trainer.strategy=zero33"])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "give a subcommand, one of fit, validate, test, predict"),
        (["fitt"], "argument subcommand: invalid choice: 'fitt'"),
        (["--model.lr=1", "fit"], "'--model.lr' goes after the subcommand"),
    ],
)
def test_a_wrong_subcommand(cli, args, expected):
    with pytest.raises(ConfigurationError) as caught:
        cli.run(args)
    assert str(caught.value).startswith(expected)


def test_a_model_must_be_named():
    with pytest.raises(ConfigurationError, match=r"^model must be given$"):
        make(None).run(["fit"])


def test_nothing_of_jsonargparse_is_deprecated(cli):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="jsonargparse")
        warnings.filterwarnings("error", category=DeprecationWarning)
        cli.run(["fit", "--model.encoder=DeepEncoder", "--trainer.callbacks=ema", "--optimizer=Adam"])


class RaisingEncoder(Encoder):
    def __init__(self, width: int = 4):
        raise LookupError("of the user's")


def test_what_a_class_raises_is_raised_unchanged(cli):
    with pytest.raises(LookupError, match="of the user's") as caught:
        cli.run(["fit", "--model.encoder=RaisingEncoder"])
    assert caught.traceback[-1].path == Path(__file__)


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ({"max_epoch": 3}, "has 'max_epoch', which the Trainer doesn't take; did you mean 'max_epochs'"),
        ({"logger": CSVLogger()}, "must hold for 'logger' what a file can"),
    ],
)
def test_wrong_defaults(defaults, expected):
    with pytest.raises(ConfigurationError, match=f"'trainer_defaults' {expected}"):
        make(trainer_defaults=defaults)


# -- environment variables -------------------------------------------------------------------------------------


def test_environment_variables(monkeypatch):
    cli = make(env_prefix="APP")
    monkeypatch.setenv("APP_FIT__MODEL__LR", "0.75")
    monkeypatch.setenv("APP_FIT__DATA__BATCH_SIZE", "2")
    monkeypatch.setenv("APP_HOME", "of another program's")
    cli.run(["fit", "--data.batch_size=8"])
    assert (cli.model.lr, cli.datamodule.batch_size) == (0.75, 8)
    cli.run(["fit", write("c.yaml", "model: {lr: 0.25}")])
    assert cli.model.lr == 0.25
    monkeypatch.setenv("APP_FIT__MODEL__L", "0.75")
    with pytest.raises(
        ConfigurationError, match="APP_FIT__MODEL__L names no option; did you mean 'APP_FIT__MODEL__LR'"
    ):
        cli.run(["fit"])
    make().run(["fit"])


# -- seeds -----------------------------------------------------------------------------------------------------


def weights(cli):
    return torch.cat([parameter.detach().flatten() for parameter in cli.model.parameters()])


def test_a_seed_makes_models_equal(cli):
    found = []
    for options in (
        ["--seed_everything=7"],
        ["--seed_everything=7"],
        ["--seed_everything=8"],
        [],
        ["--seed_everything=7"],
    ):
        cli.instantiate(options)
        found.append(weights(cli))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(found[2], found[3])  # true: the seed that TORCHHAL_SEED has by now
    torch.manual_seed(1)
    cli.instantiate(["--seed_everything=false"])
    torch.manual_seed(1)
    assert torch.equal(weights(cli), torch.cat([each.detach().flatten() for each in Net().parameters()]))


# -- the configuration of a run --------------------------------------------------------------------------------


@pytest.fixture
def training():
    return make(trainer_defaults={"fast_dev_run": False})


def test_the_configuration_is_saved_and_makes_the_same_run(training, tmp_path):
    training.run(
        ["fit", "--model.lr=0.5", "--model.encoder=DeepEncoder", "--trainer.check_val_every_n_epoch=null",
         "--trainer.val_check_interval=2", "--trainer.callbacks+=torchhal.EarlyStopping",
         "--trainer.callbacks.monitor=val_loss"]
    )  # fmt: skip
    saved = Path(training.trainer.log_dir) / "config.yaml"
    first, trainer = weights(training), training.trainer
    training.run(["fit", f"--config={saved}"])
    assert training.trainer.log_dir != trainer.log_dir
    assert torch.equal(first, weights(training)) and training.model.lr == 0.5
    assert training.trainer.check_val_every_n_epoch is None and callback(training, EarlyStopping)
    assert (Path(training.trainer.log_dir) / "config.yaml").read_text() == saved.read_text()
    assert [path.name for path in saved.parent.iterdir() if path.name.startswith(".")] == []


def test_print_config_is_a_configuration(training, capsys):
    with pytest.raises(SystemExit) as caught:
        training.run(["fit", "--model.lr=0.5", "--print_config"])
    assert caught.value.code == 0
    option = write("c.yaml", capsys.readouterr().out)
    _, model, _ = training.instantiate(
        [option.replace("c.yaml", "d.yaml")] if Path("d.yaml").exists() else ["--model.lr=0.5"]
    )
    training.run(["fit", option])
    assert model.lr == training.model.lr == 0.5


def test_a_configuration_of_another_run_stays(training):
    option = "--trainer.logger={csv: {version: 7}}"
    training.run(["fit", option])
    folder = Path(training.trainer.log_dir)
    first = (folder / "config.yaml").read_text()
    training.run(["fit", option])  # the same again
    assert [path.name for path in folder.glob("config*")] == ["config.yaml"]
    with pytest.warns(UserWarning, match=r"config.yaml in .* is of another run: .* in config-2.yaml"):
        training.run(["fit", option, "--model.lr=0.5"])
    assert (folder / "config.yaml").read_text() == first
    assert "lr: 0.5" in (folder / "config-2.yaml").read_text()


@pytest.mark.parametrize(
    "options", [["validate"], ["fit", "--trainer.logger=false"], ["fit", "--trainer.fast_dev_run=1"]]
)
def test_no_configuration_without_a_run(training, tmp_path, options):
    training.run(options)
    assert list(tmp_path.rglob("config*.yaml")) == []


def test_a_folder_that_cant_be_written(training, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("torchhal.trainer_cli._config_file.write_new", refuse)
    with pytest.warns(UserWarning, match="the configuration can't be saved in .*: Permission denied"):
        training.run(["fit"])
    assert training.trainer.global_step == 4


def test_a_file_system_without_links(tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", lambda *args: (_ for _ in ()).throw(OSError(95, "not supported")))
    assert [write_new(str(tmp_path), "c.yaml", text) for text in "aba"] == ["c.yaml", "c-2.yaml", "c.yaml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-2.yaml", "c.yaml"]


def test_checkpoints_have_the_arguments(training):
    training.run(["fit", "--model.lr=0.5", "--model.classes=3", "--data.batch_size=8"])
    path = callback(training, ModelCheckpoint).best_model_path
    loaded = Net.load_from_checkpoint(path)
    assert (loaded.lr, loaded.head.out_features) == (0.5, 3)
    assert Data.load_from_checkpoint(path).batch_size == 8
    assert json.loads((Path(training.trainer.log_dir) / "hparams.json").read_text())["lr"] == 0.5


def test_checkpoints_name_the_arguments_that_were_objects(training):
    training.run(["fit", "--model.encoder=DeepEncoder"])
    path = callback(training, ModelCheckpoint).best_model_path
    with pytest.raises(CheckpointMismatchError, match=r"encoder=\.\.\. \(a DeepEncoder\)"):
        Net.load_from_checkpoint(path)
    assert len(Net.load_from_checkpoint(path, encoder=DeepEncoder()).encoder.layers) == 2


def test_a_models_own_hyperparameters_stay():
    cli = make(SavingNet)
    cli.run(["fit", "--model.lr=0.5", "--model.secret=x"])
    assert cli.model.hparams == {"lr": 0.5}


# -- processes -------------------------------------------------------------------------------------------------


def run_script(*arguments, launcher=(), **variables):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TORCHHAL_SEED"))}
    return subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments], env={**environ, **variables}, capture_output=True,
        text=True, check=False, timeout=scaled(120),
    )  # fmt: skip


def test_a_script_ends_with_a_line_and_code_2():
    done = run_script("fit", "--model.lr=high")
    assert (done.returncode, done.stderr) == (2, "cli_train.py: error: model.lr: must be float (got 'high')\n")
    done = run_script("fit", "--trainer.strategy=zero33")
    assert done.returncode == 2 and "Traceback" not in done.stderr and "did you mean 'zero3'?" in done.stderr


def test_help_has_the_docstrings():
    done = run_script("fit", "--help")
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    assert "learning rate of SGD. (type: float, default: 0.01)" in said
    assert "end training after so many epochs" in said and "continue from a checkpoint" in said


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork", "ddp_forkserver", "torchrun"])
def test_processes_parse_once_and_agree(tmp_path, strategy):
    launcher, name = (TORCHRUN, "ddp") if strategy == "torchrun" else ((), strategy)
    options = [f"--trainer.strategy={name}", "--trainer.devices=2", "--optimizer=Adam", "--optimizer.lr=0.25"]
    done = run_script("fit", *options, launcher=launcher)
    assert done.returncode == 0, done.stderr
    parses = (tmp_path / "parses").read_text().split()
    assert len(parses) == len(set(parses)) == (2 if strategy in ("ddp", "torchrun") else 1)
    (saved,) = tmp_path.rglob("config*.yaml")
    assert f"strategy: {name}" in saved.read_text() and "steps 2" in done.stdout


@pytest.mark.slow
def test_ranks_with_different_configurations_are_refused(tmp_path):
    done = run_script("fit", "--trainer.devices=2", launcher=TORCHRUN, CLI_TRAIN_LR_OF_RANK="1")
    assert done.returncode != 0
    assert "every rank must be given the same configuration (rank 0 has 'lr: 0.1', rank 1 has 'lr: 0.2')" in done.stderr


def test_an_old_jsonargparse(monkeypatch):
    monkeypatch.delattr("jsonargparse._instantiation.InstantiateMethod.instantiate")
    monkeypatch.delattr("jsonargparse.ArgumentParser.instantiate")
    with pytest.raises(ImportError, match=r"4.53 or later \(the one that is installed is too old\)"):
        TrainerCLI(Net)


def test_without_jsonargparse(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(ImportError, match=r"pip install 'torchhal\[cli\]'"):
        TrainerCLI(Net)
