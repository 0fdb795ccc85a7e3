"""Loggers and callbacks by alias, and those that plugins add to every Trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from minimal_net import BATCHES, Net

import torchhal
import torchhal.registry
from torchhal import Trainer
from torchhal.__main__ import main
from torchhal.errors import ConfigurationError, UnknownAliasError
from torchhal.plugin import Availability
from torchhal.testing import isolated_registry
from torchhal.trainer.callbacks import Callback, EarlyStopping, EMAWeightAveraging, ModelCheckpoint, Timer
from torchhal.trainer.loggers import CSVLogger, Logger, TensorBoardLogger

QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1,
}  # fmt: skip


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss


CLASSES = """
from torchhal.plugin import Availability
from torchhal.errors import ConfigurationError
from torchhal.trainer.callbacks import Callback, ModelCheckpoint
from torchhal.trainer.loggers import Logger

class Audit(Callback):
    def __init__(self, level="low"):
        self.level = level
        self.fits = 0
    def on_fit_start(self, trainer, module):
        self.fits += 1

class Ledger(Logger):
    def __init__(self, save_dir="elsewhere"):
        self.save_dir_given, self.rows = save_dir, []
    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

class Keeper(ModelCheckpoint):
    pass

class OneProcess(Callback):
    def check_fit(self, composition):
        if composition.world_size > 1:
            raise ConfigurationError("OneProcess counts in one process only")

class Absent(Logger):
    @classmethod
    def availability(cls):
        return Availability(False, "the ledger of this host is locked")
"""

MANIFEST = """
@hookimpl
def torchhal_default_callbacks():
    return [Component("audit", "acme_classes:Audit", defaults={"level": "high"})]

@hookimpl
def torchhal_default_loggers():
    return [Component("ledger", "acme_classes:Ledger")]
"""
DECLARED = """\
[torchhal]
acme = acme_manifest
[torchhal.defaults]
audit = callback
ledger = logger
"""
NAMED = """
@hookimpl
def torchhal_callbacks():
    return [Component("audit", "acme_classes:Audit"), Component("one-process", "acme_classes:OneProcess")]

@hookimpl
def torchhal_loggers():
    return [Component("ledger", "acme_classes:Ledger"), Component("absent", "acme_classes:Absent")]
"""


@pytest.fixture
def classes(site: Any) -> Any:
    """The classes of acme's plugins, which the registry in place finds among the distributions of ``site``."""
    (site.folder / "acme_classes.py").write_text(CLASSES)
    yield site
    sys.modules.pop("acme_classes", None)


def in_place(site: Any, **environ: str) -> Any:
    return isolated_registry(distributions=list(site.distributions()), environ=environ)


def kinds(parts: list[Any]) -> list[str]:
    return [type(part).__name__ for part in parts]


# -- by alias ------------------------------------------------------------------------------------------------


def test_loggers_by_alias(tmp_path: Path) -> None:
    """An alias makes a logger that writes into the Trainer's folder."""
    trainer = Trainer(logger="csv", default_root_dir=tmp_path, **QUIET)
    trainer.fit(Logs(), BATCHES)
    assert type(trainer.logger) is CSVLogger and Path(trainer.logger.log_dir).is_relative_to(tmp_path)
    assert (Path(trainer.logger.log_dir) / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("logger", "names"),
    [
        ("CSV", [None]),
        ({"csv": {"name": "mine", "save_dir": "other"}}, ["mine"]),
        (["csv", {"csv": {"name": "mine"}}], [None, "mine"]),
        (("csv", "tensorboard"), [None, None]),
        ([], []),
    ],
    ids=str,
)
def test_several_loggers_and_options(logger: Any, names: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    loggers = Trainer(logger=logger, default_root_dir=tmp_path / "root", **QUIET).loggers
    assert [one.name for one in loggers] == [name or "torchhal_logs" for name in names]
    folder = "other" if isinstance(logger, dict) else "root"
    assert all(Path(one.save_dir) == tmp_path / folder for one in loggers)


def test_objects_and_aliases_together(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss")
    trainer = Trainer(
        logger=[TensorBoardLogger(tmp_path), "csv"],
        callbacks=["ema", {"timer": {"duration": "00:01:00:00"}}, stopping],
        default_root_dir=tmp_path,
        **QUIET,
    )
    assert kinds(trainer.loggers) == ["TensorBoardLogger", "CSVLogger"]
    ema, timer, same, checkpoint = trainer.callbacks
    assert type(ema) is EMAWeightAveraging and type(timer) is Timer and same is stopping
    assert timer.time_remaining() == 3600 and type(checkpoint) is ModelCheckpoint


def test_a_callback_by_alias_stands_for_the_one_switched_on(tmp_path: Path) -> None:
    trainer = Trainer(callbacks=[{"model_checkpoint": {"monitor": "loss"}}], default_root_dir=tmp_path, **QUIET)
    assert kinds(trainer.callbacks) == ["ModelCheckpoint"] and trainer.checkpoint_callback.monitor == "loss"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"logger": "tensorbord"},
            UnknownAliasError,
            r"no logger is called 'tensorbord'(.|\n)*did you mean 'tensorboard'",
        ),
        (
            {"logger": {"csv": {"nme": "x"}}},
            ConfigurationError,
            r"'nme' is no argument of CSVLogger; did you mean 'name'",
        ),
        ({"logger": {"csv": {"name": 3}}}, ConfigurationError, "'name' must be a str"),
        ({"logger": {"csv": {}, "tensorboard": {}}}, ConfigurationError, "'logger' with options must be one alias"),
        ({"logger": CSVLogger}, ConfigurationError, r"make an object, as CSVLogger\(...\)"),
        ({"logger": 3}, ConfigurationError, r"'logger' must be .*'csv', 'tensorboard'"),
        ({"callbacks": "early_stoping"}, UnknownAliasError, "did you mean 'early_stopping'"),
        ({"callbacks": ["early_stopping"]}, ConfigurationError, "missing a required argument: 'monitor'"),
        ({"callbacks": [{"ema": {"decay": 7}}]}, ConfigurationError, "'decay' must be"),
        ({"callbacks": EarlyStopping}, ConfigurationError, r"make an object, EarlyStopping\(...\)"),
        ({"callbacks": "csv"}, UnknownAliasError, "'csv' is the alias of a part of another kind: logger"),
        ({"plugins": "csv"}, ConfigurationError, "got the logger 'csv'.*: give it as logger="),
        ({"plugins": "ema"}, ConfigurationError, "got the callback 'ema'.*: give it as callbacks="),
    ],
    ids=str,
)
def test_wrong_aliases_and_options(arguments: Any, error: type[Exception], message: str) -> None:
    with isolated_registry(), pytest.raises(error, match=message):
        Trainer(**{**QUIET, **arguments})


def test_parts_of_plugins(classes: Any, tmp_path: Path) -> None:
    classes.add("acme", NAMED)
    with in_place(classes):
        trainer = Trainer(
            logger="ledger", callbacks=[{"acme/audit": {"level": "mid"}}], default_root_dir=tmp_path, **QUIET
        )
        trainer.fit(Logs(), BATCHES)
        assert trainer.logger.rows and trainer.logger.save_dir_given == str(tmp_path)
        assert trainer.callbacks[0].level == "mid" and trainer.callbacks[0].fits == 1
        with pytest.raises(
            ConfigurationError, match="logger 'absent' can't be used here: the ledger of this host is lo"
        ):
            Trainer(logger="absent", **QUIET)
        with pytest.raises(ConfigurationError, match="OneProcess counts in one process only"):
            Trainer(callbacks="one-process", **{**QUIET, "devices": 2, "strategy": "ddp_fork"})
        assert Trainer(callbacks="one-process", **QUIET).callbacks


def test_missing_module_of_a_logger(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"logger 'tensorboard' can't be used here: .*'tensorboard'"):
        Trainer(logger="tensorboard", **QUIET)


def test_registered_classes() -> None:
    class Mine(Logger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            pass

        @classmethod
        def availability(cls) -> Availability:
            return Availability(True)

    class Beep(Callback):
        pass

    with isolated_registry() as registry:
        registry.register("logger", "mine", Mine)
        registry.register("callback", "beep", Beep)
        trainer = Trainer(logger=["mine", "user/mine"], callbacks="beep", **QUIET)
        assert kinds(trainer.loggers) == ["Mine", "Mine"] and kinds(trainer.callbacks)[0] == "Beep"
        with pytest.raises(TypeError, match=r"must be a subclass of torchhal\.trainer\.loggers\.Logger"):
            registry.register("logger", "beep", Beep)


# -- on every run --------------------------------------------------------------------------------------------


def test_every_run_has_them(classes: Any, tmp_path: Path) -> None:
    classes.add("acme", MANIFEST, entry_points=DECLARED)
    with in_place(classes):
        trainer = Trainer(default_root_dir=tmp_path, **QUIET)
        trainer.fit(Logs(), BATCHES)
    assert kinds(trainer.loggers) == ["CSVLogger", "Ledger"]
    audit = next(each for each in trainer.callbacks if type(each).__name__ == "Audit")
    assert audit.level == "high" and audit.fits == 1
    assert kinds(trainer.callbacks)[-1] == "ModelCheckpoint"
    assert trainer.loggers[1].rows and trainer.loggers[1].save_dir_given == str(tmp_path)


def test_what_the_user_gives_replaces_them(classes: Any, tmp_path: Path) -> None:
    classes.add("acme", MANIFEST + NAMED, entry_points=DECLARED)
    with in_place(classes):
        trainer = Trainer(logger="ledger", callbacks={"audit": {"level": "low"}}, default_root_dir=tmp_path, **QUIET)
        assert kinds(trainer.loggers) == ["Ledger"]
        assert [each.level for each in trainer.callbacks if type(each).__name__ == "Audit"] == ["low"]
        assert Trainer(logger=False, **QUIET).loggers == []
        assert Trainer(fast_dev_run=True, **{**QUIET, "max_epochs": None}).loggers == []


@pytest.mark.parametrize("value", ["0", "false", "OFF"])
def test_a_variable_leaves_them_out(classes: Any, tmp_path: Path, value: str) -> None:
    classes.add("acme", MANIFEST, entry_points=DECLARED)
    with in_place(classes, TORCHHAL_DEFAULTS=value):
        trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    assert kinds(trainer.loggers) == ["CSVLogger"] and "Audit" not in kinds(trainer.callbacks)
    assert "acme_manifest" not in sys.modules


def test_disabled_plugins_bring_none(classes: Any, tmp_path: Path) -> None:
    classes.add("acme", MANIFEST, entry_points=DECLARED)
    with in_place(classes, TORCHHAL_DISABLE_PLUGINS="acme"):
        assert kinds(Trainer(default_root_dir=tmp_path, **QUIET).loggers) == ["CSVLogger"]


def test_explain_says_them(classes: Any, capsys: Any) -> None:
    classes.add("acme", MANIFEST, entry_points=DECLARED)
    with in_place(classes):
        assert main(["explain", "--accelerator", "cpu"]) == 0
        assert "every run has the callback acme/audit (a default of its plugin; TORCHHAL_DEFAULTS=0 leaves it out)" in (
            capsys.readouterr().out
        )
        assert main(["explain", "--accelerator", "cpu", "--json"]) == 0
        names = [default["name"] for default in json.loads(capsys.readouterr().out)["defaults"]]
        assert names == ["acme/ledger", "acme/audit"]


def test_other_manifests_stay_untouched(classes: Any, tmp_path: Path) -> None:
    """A manifest of a plugin that declares no default is not imported."""
    classes.add("acme", MANIFEST, entry_points=DECLARED)
    for number in range(20):
        classes.add(f"other-{number}", "import os, json, acme_elsewhere\nos._exit(1)\n")
    with in_place(classes):
        trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    assert "Ledger" in kinds(trainer.loggers)
    assert not [name for name in sys.modules if name.startswith("other_") and name.endswith("_manifest")]


def test_a_broken_plugin_is_said(classes: Any, tmp_path: Path) -> None:
    """A run goes on without the defaults of a plugin that can't be read, and says so."""
    classes.add("acme", MANIFEST + "\nraise OSError('no licence')\n", entry_points=DECLARED)
    with in_place(classes), pytest.warns(UserWarning, match="acme.*no licence"):
        trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    assert "Audit" not in kinds(trainer.callbacks)


def test_a_default_that_can_t_be_used_is_said(classes: Any, tmp_path: Path) -> None:
    manifest = MANIFEST.replace(
        'Component("ledger", "acme_classes:Ledger")', 'Component("ledger", "acme_classes:Absent")'
    )
    classes.add("acme", manifest, entry_points=DECLARED)
    with in_place(classes), pytest.warns(UserWarning, match="acme/ledger.*the ledger of this host is locked"):
        trainer = Trainer(default_root_dir=tmp_path, **QUIET)
    assert kinds(trainer.loggers) == ["CSVLogger"] and "Audit" in kinds(trainer.callbacks)


def test_a_default_checkpoint_callback(classes: Any, tmp_path: Path) -> None:
    """It is the run's, comes last, and isn't there where checkpoints are switched off."""
    classes.add(
        "acme",
        MANIFEST.replace("acme_classes:Audit", "acme_classes:Keeper").replace(', defaults={"level": "high"}', ""),
        entry_points=DECLARED,
    )
    with in_place(classes):
        assert kinds(Trainer(default_root_dir=tmp_path, **QUIET).callbacks)[-1] == "Keeper"
        assert Trainer(default_root_dir=tmp_path, enable_checkpointing=False, **QUIET).callbacks == []


def test_what_no_metadata_declares_is_no_default(classes: Any, tmp_path: Path) -> None:
    """A Trainer reads no manifest to look for defaults, so that any number of plugins costs it nothing."""
    classes.add("acme", "import os\nos._exit(3)\n" + MANIFEST)
    with in_place(classes):
        assert "Audit" not in kinds(Trainer(default_root_dir=tmp_path, **QUIET).callbacks)


def test_plugins_lists_them(classes: Any, capsys: Any) -> None:
    classes.add("acme", MANIFEST + NAMED, entry_points=DECLARED)
    with in_place(classes):
        assert main(["plugins"]) == 0
    said = capsys.readouterr().out
    for line in ("default_callback audit", "default_logger ledger", "callback one-process", "logger ledger"):
        assert line in said
    assert torchhal.registry.aliases("callback")  # core's own


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "audit = callbak",
            "declares audit = callbak in [torchhal.defaults], which is ignored: the value must be 'logger'",
        ),
        (
            "audit",
            "declares audit =  in [torchhal.defaults], which is ignored: the value must be 'logger' or 'callback'",
        ),
        ("Au dit = callback", "in [torchhal.defaults], which is ignored: the name must be an alias"),
        ("audit = logger", "has no default logger 'audit' that can be used (it has 'ledger')"),
        ("audti = callback", "has no default callback 'audti' that can be used (it has 'audit')"),
    ],
)
def test_a_wrong_declaration_is_a_problem(classes: Any, tmp_path: Path, capsys: Any, line: str, said: str) -> None:
    """It costs only itself: the other default is in the Trainer, and commands say what is wrong and what to add."""
    classes.add("acme", MANIFEST, entry_points=DECLARED.replace("audit = callback", line))
    with in_place(classes):
        trainer = Trainer(default_root_dir=tmp_path, **QUIET)
        assert "Ledger" in kinds(trainer.loggers) and "Audit" not in kinds(trainer.callbacks)
    for command in ("plugins", "doctor"):
        with in_place(classes):
            assert main([command]) == 0
        shown = capsys.readouterr().out
        assert said in shown and "problem: its entry_points.txt declares" in shown
        assert "the default callback 'audit' is in no Trainer" in shown
        assert "the default logger 'ledger' is in no" not in shown


def test_plugins_names_the_declaration_that_is_missing(classes: Any, capsys: Any) -> None:
    classes.add("acme", MANIFEST)
    with in_place(classes):
        assert main(["plugins"]) == 0
    shown = capsys.readouterr().out
    assert "problem: the default callback 'audit' is in no Trainer" in shown
    assert '[project.entry-points."torchhal.defaults"] with audit = "callback"' in shown
    assert '[project.entry-points."torchhal.defaults"] with ledger = "logger"' in shown


def test_right_declarations_are_no_problem(classes: Any, capsys: Any) -> None:
    classes.add("acme", MANIFEST + NAMED, entry_points=DECLARED)
    with in_place(classes):
        assert main(["plugins"]) == 0
    assert "problem" not in capsys.readouterr().out


def test_declarations_without_a_plugin(classes: Any, capsys: Any) -> None:
    classes.add("acme", "", entry_points="[torchhal.defaults]\naudit = callback\n")
    with in_place(classes):
        assert main(["plugins"]) == 0
    assert "its entry_points.txt has [torchhal.defaults], but no plugin in [torchhal]" in capsys.readouterr().out
