from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

import torchhal
from torchhal import cli
from torchhal.cli import _doctor
from torchhal.errors import ConfigurationError
from torchhal.plugin import Availability
from torchhal.precision import SinglePrecision
from torchhal.testing import isolated_registry

PRINTS = """\
import ctypes, os, sys
from torchhal.plugin import Component, hookimpl
print("print")
os.write(1, b"write\\n")
ctypes.CDLL(None).puts(b"puts")

@hookimpl
def torchhal_accelerators():
    print("hook")
    return [Component("board", "loud_part:Board", summary="A board", aliases=("plank",), requires=("no_such_vendor",))]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a plugin that prints in every way there is, the only one the registry sees."""
    (tmp_path / "loud_manifest.py").write_text(PRINTS)
    info = tmp_path / "loud-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: loud\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[torchhal]\nloud = loud_manifest\n")
    monkeypatch.syspath_prepend(tmp_path)
    with isolated_registry(distributions=importlib_metadata.distributions(path=[str(tmp_path)])):
        yield tmp_path
    sys.modules.pop("loud_manifest", None)


def environment(path: Path | None, **environ: str) -> dict[str, str]:
    # PYTHONUNBUFFERED takes away the buffer of C's stdio, too, and with it what there is to test about it.
    dropped = ("TORCHHAL_", "PYTHONUNBUFFERED")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    folders = [str(path or ""), os.environ.get("PYTHONPATH", "")]
    return {**clean, "PYTHONPATH": os.pathsep.join(filter(None, folders)), **environ}


def torchhal_command(*arguments: str, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchhal.cli", *arguments],
        env=environment(path, **environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_plugins_as_json(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "--json"]) == 0
    out, err = capfd.readouterr()
    listed = json.loads(out)
    assert listed["plugins"][0].pop("load_ms") > 0
    assert listed == {
        "schema": 1,
        "torchhal": torchhal.__version__,
        "plugins": [
            {
                "name": "loud",
                "distribution": "loud",
                "version": "1.5",
                "status": "loaded",
                "reason": "",
                "file": str(site / "loud_manifest.py"),
                "components": [
                    {
                        "kind": "accelerator",
                        "alias": "board",
                        "aliases": ["plank"],
                        "target": "loud_part:Board",
                        "summary": "A board",
                        "available": False,
                        "reason": "the Python module 'no_such_vendor' is not installed",
                    }
                ],
            }
        ],
    }
    for words in ("print", "write", "puts", "hook"):
        assert words in err


def test_manifest_output_goes_to_stderr(site: Path) -> None:
    """What manifests print goes to stderr, in a process of its own."""
    done = torchhal_command("plugins", "--json", path=site)
    assert "loud" in [plugin["name"] for plugin in json.loads(done.stdout)["plugins"]]
    assert {"print", "write", "puts", "hook"} <= set(done.stderr.split())


def test_plugins_as_text(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "'loud' (loud 1.5) is loaded",
        "  accelerator board (plank): A board",
        "    not available: the Python module 'no_such_vendor' is not installed",
    ]


ESCAPES = """\
from torchhal.plugin import Component, hookimpl

@hookimpl
def torchhal_accelerators():
    return [
        Component("board", "escaping_part:Board", summary="title \\x1b]0;owned\\x07, up \\x1b[1A\\x9b2J"),
        Component("other\\x1b[2J", "escaping_part:Board"),
        Component("plank", "m\\x1b[2J:Board\\u202e", summary="two\\nlines"),
    ]
"""
PART = """\
from torchhal.accelerators import Accelerator
from torchhal.plugin import Availability

class Board(Accelerator):
    name = "board"
    device_type = "cpu"
    auto_priority = 99

    @classmethod
    def availability(cls):
        return Availability(False, "no \\x1b]0;owned\\x07 board\\r\\x1b[2K")
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A plugin whose every text holds what a terminal would act upon, and one whose manifest fails with such a text."""
    for name, source, version in (
        ("escaping", ESCAPES, "1\x1b[31m"),
        ("failing", "raise OSError('\\x1b[31mrot: Größe, 漢字 \\x1b]0;owned\\x07 \\ud800')", "1"),
    ):
        (tmp_path / f"{name}_manifest.py").write_text(source, encoding="utf-8")
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[torchhal]\n{name} = {name}_manifest\n")
    (tmp_path / "escaping_part.py").write_text(PART)
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [("plugins",), ("doctor",), ("explain",), ("explain", "--accelerator", "board"), ("explain", "--strategy", "x")],
    ids=" ".join,
)
def test_no_escape_of_a_plugin_reaches_the_terminal(hostile: Path, arguments: tuple[str, ...]) -> None:
    done = torchhal_command(*arguments, path=hostile, TORCHHAL_PLUGINS="escaping,failing")
    said = done.stdout + done.stderr
    assert {char for char in said if not char.isprintable()} <= {"\n"}
    assert "\\x1b" in said, "what was there is shown"
    assert "Größe, 漢字" in said or "--accelerator" in arguments  # other languages are no escapes


@pytest.mark.parametrize(
    "variables", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}]
)
def test_plugins_in_a_locale_that_lacks_the_letters(hostile: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchhal", "plugins"],
        env=environment(hostile, TORCHHAL_PLUGINS="escaping,failing", **variables),
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert b"'failing' (failing 1) is broken: OSError" in done.stdout


def test_errors_escape_control_characters(hostile: Path) -> None:
    """An error in a program holds no terminal escape sequence."""
    program = "import torchhal\ntry: torchhal.Trainer(accelerator='nothing')\nexcept LookupError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", f"{program}\ntorchhal.Trainer()"],
        env=environment(hostile, TORCHHAL_PLUGINS="escaping,failing"),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "installed but unusable: board: no \\x1b]0;owned" in done.stderr and "failing" in done.stdout
    assert {char for char in done.stdout + done.stderr if not char.isprintable()} <= {"\n"}


def test_python_m_torchhal() -> None:
    done = subprocess.run([sys.executable, "-m", "torchhal", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"torchhal {torchhal.__version__}\n"


def test_plugins_without_import(site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "--json", "--no-import"]) == 0
    out, err = capfd.readouterr()
    (plugin,) = json.loads(out)["plugins"]
    assert (plugin["status"], plugin["load_ms"], plugin["components"]) == ("found", None, [])
    assert "loud_manifest" not in sys.modules and err == ""


def test_no_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    with isolated_registry():
        assert cli.main(["plugins"]) == 0
    assert "no plugins are installed" in capsys.readouterr().out


@pytest.mark.cold_start
def test_plugins_does_not_import_torch(site: Path) -> None:
    program = "import sys; from torchhal.cli import main; main(['plugins']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(site),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_an_error_is_one_line(site: Path) -> None:
    (site / "loud_manifest.py").write_text("raise OSError('two\\nlines')")
    done = torchhal_command("plugins", path=site, TORCHHAL_STRICT_PLUGINS="1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: plugin 'loud' (loud 1.5) is broken: OSError: two lines (")
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_is_no_error(site: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "torchhal.cli", "plugins", "--json"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == b""


def test_no_stdout_at_all(site: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m torchhal.cli plugins >&-"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchhal.registry.plugins", interrupt)
    assert cli.main(["plugins"]) == 130


def test_stdout_is_put_back_after_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), cli.output_to_stderr():
        os.write(1, b"inside\n")
        raise ZeroDivisionError
    os.write(1, b"after\n")
    print("too")
    out, err = capfd.readouterr()
    assert (out, err) == ("after\ntoo\n", "inside\n")


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--version"], 0), ([], 2), (["plugins", "--jso"], 2)):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == code
    assert f"torchhal {torchhal.__version__}\n" in capsys.readouterr().out
    assert cli.main(["plugin"]) == 2
    assert "no command is called 'plugin'; " in (error := capsys.readouterr().err) and "mean 'plugins'?" in error


# -- explain -------------------------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What explain asks ``torchhal.resolve`` for."""
    seen: list[Any] = []

    class Plan:
        def describe(self) -> str:
            return "the plan"

        def to_dict(self) -> dict[str, Any]:
            return {"schema": 1}

    def resolve(request: Any) -> Plan:
        print("noise")
        if request.devices == "-7":
            raise ConfigurationError("'devices' must be\n  positive (got '-7')")
        seen.append(vars(request))
        return Plan()

    stand_in = types.ModuleType("torchhal.resolve")
    stand_in.Request = types.SimpleNamespace  # type: ignore[attr-defined]
    stand_in.resolve = resolve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchhal.resolve", stand_in)
    return seen


def test_explain_passes_on_what_was_given(requests: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    given = {"accelerator": "cpu", "strategy": "ddp", "devices": "0,2", "precision": "16-mixed"}
    options = [f"--{name}={value}" for name, value in given.items()]
    assert cli.main(["explain"]) == 0
    assert cli.main(["explain", *options, "--num-nodes", "3", "--plugin", "a", "--plugin", "b"]) == 0
    defaults = {"accelerator": "auto", "strategy": "auto", "devices": "auto", "precision": None}
    assert requests == [{**defaults, "num_nodes": 1, "plugins": ()}, {**given, "num_nodes": 3, "plugins": ("a", "b")}]
    captured = capsys.readouterr()
    assert captured.out == "the plan\nthe plan\n"
    assert captured.err == "noise\nnoise\n"


def test_explain_as_json_and_its_errors(requests: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "defaults": []}
    assert cli.main(["explain", "--devices=-7"]) == 2
    assert capsys.readouterr().err == "noise\nerror: 'devices' must be positive (got '-7')\n"


def test_explain_for_real() -> None:
    done = torchhal_command("explain", "--accelerator", "cpu", "--devices", "2", "--json", TORCHHAL_PLUGINS="")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["accelerator"]["choice"], plan["strategy"]["choice"]) == ("cpu", "ddp")
    wrong = torchhal_command("explain", "--accelerator", "tpu", TORCHHAL_PLUGINS="")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: no accelerator is called 'tpu'") and wrong.stderr.count("\n") == 1


# -- doctor --------------------------------------------------------------------------------------------------


def test_doctor(site: Path) -> None:
    (site / "loud_part.py").write_text("raise SystemExit('no licence')")
    text = (site / "loud_manifest.py").read_text()
    (site / "loud_manifest.py").write_text(text.replace('requires=("no_such_vendor",)', ""))
    (site / "loud-1.5.dist-info" / "entry_points.txt").write_text(
        "[torchhal]\nbad = no_such_manifest\nloud = loud_manifest"
    )
    variables = {"RANK": "3", "ACME_VISIBLE_DEVICES": "0,1", "SLURM_JWT": "secret", "UNRELATED": "x"}
    done = torchhal_command("doctor", "--json", path=site, **variables, TORCHHAL_STRICT_PLUGINS="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    assert found["versions"]["torchhal"] == torchhal.__version__
    assert found["versions"]["torch"][0].isdigit()
    status = {plugin["name"]: plugin["status"] for plugin in found["plugins"]}
    assert (status["bad"], status["loud"]) == ("broken", "loaded")
    accelerators = {part["name"]: part for part in found["accelerators"]}
    assert accelerators["torchhal/cpu"] == {"name": "torchhal/cpu", "available": True, "reason": ""}
    assert not accelerators["loud/board"]["available"]
    assert "SystemExit: no licence" in accelerators["loud/board"]["reason"]
    assert "torchhal/local" in {part["name"] for part in found["cluster_environments"]}
    [recommended] = found["recommendations"]
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in recommended
    done = torchhal_command("doctor", "--json", path=site, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert json.loads(done.stdout)["recommendations"] == []
    assert {name: found["environment"].get(name) for name in variables} == {
        "RANK": "3",
        "ACME_VISIBLE_DEVICES": "0,1",
        "SLURM_JWT": "(hidden)",
        "UNRELATED": None,
    }


def test_doctor_says_what_starts_the_processes(site: Path) -> None:
    alone = torchhal_command("doctor", path=site, TORCHHAL_PLUGINS="")
    (line,) = [line for line in alone.stdout.splitlines() if "torchhal/local" in line]
    assert line == "  torchhal/local used: no cluster is detected, torchhal starts the processes on this machine"
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}
    started = torchhal_command("doctor", path=site, TORCHHAL_PLUGINS="", **variables)
    assert "  torchhal/env detected" in started.stdout, started.stdout
    assert "  torchhal/local not detected" in started.stdout


def test_doctor_as_text_without_torch(site: Path) -> None:
    (site / "torch.py").write_text("raise ImportError('no torch here')")
    done = torchhal_command("doctor", path=site)
    assert done.returncode == 0, done.stderr
    assert "  torch can't be imported: ImportError: no torch here" in done.stdout
    assert "  loud (loud 1.5) loaded" in done.stdout
    assert "  loud/board not available: the Python module 'no_such_vendor' is not installed" in done.stdout
    assert "  torchhal/cpu not available: " in done.stdout


class Outdated(SinglePrecision):
    @classmethod
    def availability(cls):
        return Availability(False, "acme_sdk 1.0 is too old")


def test_doctor_lists_components_that_can_t_be_used():
    with isolated_registry() as registry:
        registry.register("precision", "outdated", Outdated)
        found = [part for entry in registry.entries("precision") for part in _doctor._unavailable(entry)]
    assert {"kind": "precision", "name": "user/outdated", "reason": "acme_sdk 1.0 is too old"} in found
    assert not [part for part in found if part["name"].startswith("torchhal/")]
