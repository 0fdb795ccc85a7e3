"""Training with Bagua's algorithms on the stub, against plain PyTorch; refusals; and runs that fail."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stub_processes
from limits import scaled

HERE = Path(__file__).parent


@pytest.mark.slow
def test_two_ranks(python, tmp_path):
    told = python("two.py", tmp_path)
    for check in (
        "like_ddp",
        "left_alone",
        "in_bytes",
        "momentum",
        "resumed",
        "own_weights",
        "background",
        "afterwards",
    ):
        assert check in told
    assert "UserWarning" not in told


def test_four_ranks(python):
    assert "low_precision_decentralized" in python("four.py")


def test_one_rank_and_refusals(python):
    assert python("alone.py").split() == ["alone", "options", "combinations", "models", "ignored"]


def start(script, *arguments, **variables):
    return subprocess.Popen(
        [sys.executable, str(HERE / "scripts" / script), *arguments],
        env=stub_processes.environment("BAGUA_STUB", variables),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finished(runs):
    """What each of these processes printed, when all have ended."""
    deadline = time.monotonic() + scaled(160)
    try:
        return [run.communicate(timeout=deadline - time.monotonic())[0] for run in runs]
    finally:
        for run in runs:
            run.kill()


def test_two_nodes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    runs = [start("nodes.py", NODE_RANK=node, **meeting) for node in "01"]
    told = finished(runs)
    assert [run.returncode for run in runs] == [0, 0], "\n".join(told)
    assert "nodes" in told[0]


def test_a_rank_that_fails_ends_the_run():
    """While weights are averaged in the background, and where a gradient is waited for in vain."""
    runs = [start("failing.py", how) for how in ("raises", "killed", "unused")]
    raised, killed, unused = finished(runs)
    assert all(run.returncode != 0 for run in runs)
    assert "rank 1 failed" in raised and "the batch is bad" in raised
    assert "SIGKILL" in killed
    assert "'weight', 'bias' were not used by training_step on rank 1" in unused


@pytest.mark.cold_start
def test_nothing_of_bagua_is_imported_at_discovery(python):
    code = (
        "import sys, torchhal_bagua._plugin, torchhal_bagua; from torchhal.registry import plugins, find\n"
        "assert any(record.name == 'bagua' and record.status == 'loaded' for record in plugins())\n"
        "assert not {'torch', 'bagua', 'bagua_stub'} & set(sys.modules)\n"
        "cls = find('strategy', 'bagua').load()\n"
        "assert cls.accelerators == {'cpu'} and 'torch' in sys.modules and 'bagua' not in sys.modules\n"
    )
    python(code)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import bagua", ["bagua-stub 0.9.2+stub", "BAGUA_STUB=1"]),
        ("from torchhal_bagua import BaguaStrategy; BaguaStrategy()", ["needs Bagua itself", "BAGUA_STUB=1"]),
        (
            "from torchhal_bagua import BaguaStrategy as B; assert B.accelerators == {'gpu'}\n"
            "from torchhal import Trainer; Trainer(accelerator='cpu', devices=2, strategy='bagua')",
            ["needs Bagua itself"],
        ),
    ],
)
def test_the_stub_must_be_wanted(process, code, words):
    done = process(code, BAGUA_STUB=None)
    assert done.returncode != 0
    for word in words:
        assert word in done.stderr


def other_distribution(folder, name, version):
    """An installed distribution of that name, as metadata has it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_stub_stays_out_of_the_way_of_the_real_one(process, tmp_path):
    other_distribution(tmp_path, "bagua-cuda116", "0.9.2")
    done = process("import bagua", PYTHONPATH=str(tmp_path))
    assert done.returncode != 0 and "bagua-stub and bagua-cuda116 are both installed" in done.stderr


def test_another_version_is_named(process, tmp_path):
    other_distribution(tmp_path, "bagua", "0.8.0")
    done = process("from torchhal_bagua import BaguaStrategy; BaguaStrategy()", PYTHONPATH=str(tmp_path))
    assert "works with bagua ==0.9.2 (found bagua 0.8.0)" in done.stderr


def test_a_missing_bagua_is_named(process):
    """Where no distribution has it: the plugin loads, and says what it needs."""
    code = (
        "from importlib import metadata\n"
        "real = metadata.distribution\n"
        "def missing(name):\n"
        "    if name.startswith('bagua'):\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.distribution = missing\n"
        "from torchhal_bagua import BaguaStrategy; BaguaStrategy()\n"
    )
    assert "needs the package bagua, which is not installed" in process(code).stderr


@pytest.mark.slow
def test_a_loop_by_run_is_the_plain_one(python):
    assert "all right" in python("own_loop.py")
