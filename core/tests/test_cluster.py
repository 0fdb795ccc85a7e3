"""Cluster environments from recorded variables (ENV-01 to ENV-17)."""

import os
import pickle
import socket
import subprocess
import sys

import pytest

from torchhal.cluster import LocalEnvironment, TorchElasticEnvironment
from torchhal.errors import ConfigurationError
from torchhal.resolve import Request, resolve

# Captured from torchrun --nnodes 2 with 3 + 1 processes, second node.
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
LAUNCHED = {
    "TORCHHAL_LAUNCH_ID": "abc",
    "TORCHHAL_LAUNCH_KIND": "spawn",
    "RANK": "2",
    "LOCAL_RANK": "0",
    "NODE_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "4711",
}
BY_HAND = {"NODE_RANK": "1", "MASTER_ADDR": "[fd99::101]", "MASTER_PORT": "29501"}
ENV_CONTRACT = {  # Azure ML, or somebody's own: complete, but not ours
    **{name: LAUNCHED[name] for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")},
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "6105",
}
TABLES = {"clean": {}, "torchrun": TORCHRUN, "launched": LAUNCHED, "by hand": BY_HAND, "env://": ENV_CONTRACT}
NAMES = {*TORCHRUN, *LAUNCHED, *BY_HAND}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def table(monkeypatch):
    def enter(name, **changes):
        for key, value in {**TABLES[name], **changes}.items():
            if value is None:
                monkeypatch.delenv(key, raising=False)
            else:
                monkeypatch.setenv(key, value)

    return enter


def numbers(environment):
    return (
        environment.global_rank(),
        environment.local_rank(),
        environment.node_rank(),
        environment.world_size(),
        environment.local_world_size(),
    )


@pytest.mark.parametrize("name", TABLES)
def test_detection_is_true_under_its_own_table_only(table, name):
    table(name)
    assert LocalEnvironment.detect() is (name in ("launched", "by hand"))
    assert TorchElasticEnvironment.detect() is (name == "torchrun")


def test_torchrun_numbers_are_taken_as_given(table):
    table("torchrun")
    environment = TorchElasticEnvironment()
    assert numbers(environment) == (3, 0, 1, 4, 1)
    assert (environment.main_address, environment.main_port) == ("node1", 29500)
    assert environment.creates_processes_externally


@pytest.mark.parametrize("value", [None, "", "  ", "x", "-1", "1.0", "+1", "1_0", "٣"])
@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
def test_missing_or_garbled_variables_are_named(table, name, value):
    table("torchrun", **{name: value})
    environment = TorchElasticEnvironment()
    read = {
        "RANK": environment.global_rank,
        "LOCAL_RANK": environment.local_rank,
        "GROUP_RANK": environment.node_rank,
        "WORLD_SIZE": environment.world_size,
        "LOCAL_WORLD_SIZE": environment.local_world_size,
        "MASTER_PORT": lambda: environment.main_port,
    }
    with pytest.raises(ConfigurationError, match=rf"^{name} must be"):
        read[name]()


@pytest.mark.parametrize("port", ["0", "65536"])
def test_port_out_of_range(table, port):
    table("torchrun", MASTER_PORT=port)
    with pytest.raises(ConfigurationError, match="MASTER_PORT must be 1 to 65535"):
        _ = TorchElasticEnvironment().main_port


@pytest.mark.parametrize(
    ("arguments", "varies"),
    [(["--nnodes", "1:2", "x.py"], True), (["--nnodes=1:4", "x.py"], True), (["--nnodes", "2", "x.py"], False)],
)
def test_torchruns_command_line_says_whether_nodes_may_change(arguments, varies):
    """The agent is the parent of its workers."""
    worker = "import torchhal.cluster.torchelastic as t; print(len(t.TorchElasticEnvironment.recommendations()))"
    agent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", agent, *arguments], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, **TORCHRUN},
    )  # fmt: skip
    assert done.stdout.strip() == str(int(varies))


def test_settings_that_differ_from_torchruns_show_both_numbers(table):
    table("torchrun")
    environment = TorchElasticEnvironment()
    environment.validate_settings(num_devices=1, num_nodes=2)
    with pytest.raises(ConfigurationError, match=r"started 1 process.*8 device"):
        environment.validate_settings(num_devices=8, num_nodes=2)
    with pytest.raises(ConfigurationError, match=r"started 2 node.*5 node"):
        environment.validate_settings(num_devices=1, num_nodes=5)
    table("torchrun", RANK="4")
    with pytest.raises(ConfigurationError, match=r"RANK=4 of WORLD_SIZE=4"):
        environment.validate_settings(num_devices=1, num_nodes=2)


def test_local_environment_before_launch(table):
    """Before a launch the local environment is rank 0 of 1, whatever variables are set."""
    table("env://")
    environment = LocalEnvironment()
    environment.configure(1, 2)
    assert numbers(environment) == (0, 0, 0, 1, 1)
    assert not environment.creates_processes_externally
    with pytest.raises(ConfigurationError, match="known after the launch"):
        _ = environment.main_port


def test_local_in_the_launching_process(table):
    environment = LocalEnvironment()
    environment.configure(1, 2)
    environment.set_rendezvous("127.0.0.1", 4711)
    assert numbers(environment) == (0, 0, 0, 2, 2)
    assert (environment.main_address, environment.main_port) == ("127.0.0.1", 4711)
    environment.teardown()
    environment.teardown()
    assert numbers(environment) == (
        0,
        0,
        0,
        2,
        2,
    )  # the other processes are still there: a save after the run meets them


def test_local_in_a_launched_process(table):
    table("launched")
    environment = LocalEnvironment()
    environment.configure(2, 2)
    assert numbers(environment) == (2, 0, 1, 4, 2)
    assert (environment.main_address, environment.main_port) == ("127.0.0.1", 4711)
    with pytest.raises(ConfigurationError, match=r"one of 2 on its node and 4 in all, but 3 device.*3 processes"):
        environment.configure(1, 3)


def test_local_several_nodes_by_hand(table):
    table("by hand")
    environment = LocalEnvironment()
    environment.configure(2, 4)
    assert numbers(environment) == (4, 0, 1, 8, 4)
    assert (environment.main_address, environment.main_port) == ("fd99::101", 29501)
    table("by hand", NODE_RANK="2")
    with pytest.raises(ConfigurationError, match=r"NODE_RANK must be below 'num_nodes' \(2\) \(got 2\)"):
        environment.configure(2, 4)


def test_forgotten_num_nodes_refused(table):
    """``num_nodes`` forgotten: every host would train alone, and end well."""
    table("by hand")
    with pytest.raises(ConfigurationError, match=r"NODE_RANK=1 says that this is one of several nodes.*'num_nodes'"):
        resolve(Request(accelerator="cpu", devices=1, num_nodes=1))
    table("by hand", NODE_RANK="0")
    assert resolve(Request(accelerator="cpu", devices=1)).world_size == 1


def test_missing_node_rank_hints_at_srun(table, monkeypatch):
    """In an allocation of Slurm's the error for a missing NODE_RANK names srun."""
    table("by hand", NODE_RANK=None)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(ConfigurationError, match=r"NODE_RANK must be set.*start the script with srun"):
        LocalEnvironment().configure(2, 4)


@pytest.mark.parametrize("name", BY_HAND)
def test_local_several_nodes_name_the_missing_variable(table, name):
    table("by hand", **{name: None})
    with pytest.raises(ConfigurationError, match=f"{name} must be set"):
        LocalEnvironment().configure(2, 4)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "2", None])
def test_configure_checks_its_arguments(bad):
    with pytest.raises(ConfigurationError, match=r"'num_nodes' must be an int of at least 1 \(got"):
        LocalEnvironment().configure(bad, 1)
    with pytest.raises(ConfigurationError, match=r"'local_world_size' must be"):
        LocalEnvironment().configure(1, bad)


def test_a_pickled_copy_answers_for_its_own_process(table):
    environment = LocalEnvironment()
    environment.configure(1, 2)
    environment.set_rendezvous("127.0.0.1", 4711)
    data = pickle.dumps(environment)
    table("launched", RANK="1", LOCAL_RANK="1", NODE_RANK="0", WORLD_SIZE="2")
    assert numbers(pickle.loads(data)) == (1, 1, 0, 2, 2)


@pytest.mark.parametrize("name", ["torchrun", "launched", "by hand"])
def test_reading_is_quick_and_writes_nothing(table, name, monkeypatch):
    import os

    asked = []
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: asked.append(arguments))

    table(name)
    before = dict(os.environ)
    calls = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        for cls in (LocalEnvironment, TorchElasticEnvironment):
            if cls.detect():
                environment = cls()
                numbers(environment)
    finally:
        sys.setprofile(None)
    assert len(calls) < 5000  # some milliseconds of Python
    assert not asked, "it has asked the network"
    assert dict(os.environ) == before
