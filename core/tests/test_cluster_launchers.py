"""Slurm, MPI, LSF, Flux, Kubeflow and env:// from their variables: what real runs have set; and what can't be run here,
from its sources (JSM, Flux, the training operator's envvar.go)."""

import os
import pickle
import signal
import subprocess
import time
from pathlib import Path

import pytest
from limits import scaled

from torchhal import registry
from torchhal.accelerators import CPUAccelerator
from torchhal.cluster import _hostlist as hostlist
from torchhal.cluster._topology import gather_topology, port_from_job_id, topology_of
from torchhal.cluster.local import LocalEnvironment
from torchhal.cluster.slurm import SlurmEnvironment
from torchhal.errors import ConfigurationError, UnknownAliasError
from torchhal.resolve._launcher_choice import choose_environment
from torchhal_conformance._launcher_env import INTERACTIVE, TABLES, WORLDS

BY_HAND = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
AZURE = tuple(
    {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "NODE_RANK": str(rank // 2), "WORLD_SIZE": "4", **BY_HAND,
     "LOCAL_WORLD_SIZE": "2", "NNODES": "2"}
    for rank in range(4)
)  # fmt: skip
FLUX = tuple(
    {"FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank), "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1",
     "FLUX_JOB_ID": "ƒ38rBqEWT", "PMI_RANK": str(rank), "PMI_SIZE": "2"}
    for rank in range(2)
)  # fmt: skip
TRAINER_V2 = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1", "PET_MASTER_PORT": "29500",
    "PET_MASTER_ADDR": "job-node-0-0.job", "KUBERNETES_PORT": "tcp://10.96.0.1:443",
}  # fmt: skip
BATCH_SCRIPT_FROM_A_STEP = {
    **INTERACTIVE["slurm"], "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip


LAUNCHERS = (
    "SLURM", "OMPI", "PMI", "JSM", "LSB", "FLUX", "PET_", "MASTER_", "KUBE", "TORCHHAL_C", "SM_", "PALS_", "AZ_",
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "NNODES", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def job(monkeypatch):
    """Enter a process of a job; what a Trainer would choose there."""

    def enter(*tables, **changes):
        for name, value in {name: value for table in (*tables, changes) for name, value in table.items()}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        return chosen()

    return enter


def chosen():
    return choose_environment({}, CPUAccelerator(), []).value


def numbers(environment):
    return (
        environment.global_rank(), environment.local_rank(), environment.node_rank(), environment.world_size(),
        environment.local_world_size(),
    )  # fmt: skip


class TestHostLists:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [  # each as scontrol show hostnames prints it
            ("n[1-2]", "n1 n2"),
            ("node[01-03,07]", "node01 node02 node03 node07"),
            ("a,b,c", "a b c"),
            ("alpha,beta[2-3],gamma", "alpha beta2 beta3 gamma"),
            ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
            ("host-[01],host-[03-04]", "host-01 host-03 host-04"),
            ("rack[0-1]n[0-2]", "rack0n0 rack0n1 rack0n2 rack1n0 rack1n1 rack1n2"),
            ("n[10,9,8]", "n10 n9 n8"),
            ("ip-10-0-0-[5-7]", "ip-10-0-0-5 ip-10-0-0-6 ip-10-0-0-7"),
            ("fd99::[101-102]", "fd99::101 fd99::102"),
            ("n[098-101]", "n098 n099 n100 n101"),
        ],
    )
    def test_forms(self, text, hosts):
        assert hostlist.hosts(text) == hosts.split()

    @pytest.mark.parametrize(
        "text",
        ["", "n[1-2]-ib", "n[", "n[1", "n]1", "n[a]", "n[3-1]", "n[1-]", "a,,b", "a,", ",a", "a b", "n[1-99999999]"],
    )
    def test_what_is_none(self, text):
        with pytest.raises(ValueError, match=r"."):
            hostlist.hosts(text)

    def test_ranges_that_multiply_don_t_fill_the_memory(self):
        with pytest.raises(ValueError, match="more than 1000000 hosts"):
            hostlist.hosts("a[1-2000]b[1-2000]")

    def test_tasks(self):
        assert hostlist.tasks_per_node("2(x2),1,3(x1)") == [2, 2, 1, 3]
        for text in ("", "x", "2(x", "1,", "2(x99999999999)", "-1", "0(x2),2"):
            with pytest.raises(ValueError, match="neither a number"):
                hostlist.tasks_per_node(text)


class TestSlurmSteps:
    def test_uneven_nodes(self, job):
        found = []
        for row in WORLDS["slurm"]["3+1"].tables:
            environment = job(row)
            environment.validate_settings(num_devices=environment.local_world_size(), num_nodes=2)
            found.append(numbers(environment))
        assert found == [(0, 0, 0, 4, 3), (1, 1, 0, 4, 3), (2, 2, 0, 4, 3), (3, 0, 1, 4, 1)]

    def test_heterogeneous_job(self, job):
        """Captured from srun -n1 -w n2 : -n2 -w n1: SLURM_NODEID follows the components, the counts follow the list."""
        step = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3",
                "SLURM_NPROCS": "3", "SLURM_HET_SIZE": "2"}  # fmt: skip
        rank2 = {"SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURMD_NODENAME": "n1"}
        environment = job(TABLES["slurm"][0], step, rank2)
        assert numbers(environment) == (2, 1, 1, 3, 2)
        environment = job(SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0", SLURMD_NODENAME="n2")
        with pytest.raises(ConfigurationError, match=r"rank 0 runs on n2, but the step's hosts begin with n1.*ADDR=n2"):
            environment.validate_settings(num_devices=1, num_nodes=2)
        job(MASTER_ADDR="n2")
        environment.validate_settings(num_devices=1, num_nodes=2)
        assert environment.main_address == "n2"

    def test_node_of_rank_in_block_distribution(self, job, monkeypatch):
        """The node of a rank is known where Slurm filled node after node."""
        environment = job(WORLDS["slurm"]["3+1"].tables[0])
        assert [environment.node_of(rank) for rank in range(5)] == ["n1", "n1", "n1", "n2", None]
        job(SLURM_DISTRIBUTION="block:cyclic")
        assert environment.node_of(3) == "n2"
        job(SLURM_DISTRIBUTION="cyclic")
        assert environment.node_of(3) is None
        monkeypatch.delenv("SLURM_DISTRIBUTION")
        job(SLURM_PROCID="3")  # which would be n2's: no blocks after all
        assert environment.node_of(3) is None

    def test_arbitrary_distribution_reads_host_file(self, job, tmp_path):
        """With Slurm's arbitrary distribution the host file's first line is the address."""
        path = tmp_path / "hosts"
        environment = job(TABLES["slurm"][0], SLURM_DISTRIBUTION="arbitrary", SLURM_HOSTFILE=str(path))
        with pytest.raises(ConfigurationError, match=r"SLURM_HOSTFILE.*No such file.*set MASTER_ADDR"):
            _ = environment.main_address
        path.write_text("\nn2\nn1\n")
        assert environment.main_address == "n2"

    @pytest.mark.parametrize("table", [INTERACTIVE["slurm"], BATCH_SCRIPT_FROM_A_STEP])
    def test_an_allocation_is_no_step(self, job, table):
        assert job(table).name == "local"

    def test_a_batch_script_whose_step_was_as_large(self, job, tmp_path):
        """Submitted from a task of a step with as many tasks as its own job: all numbers agree."""
        if not Path("/proc/self/comm").exists():
            pytest.skip("environment: no /proc here")
        script = tmp_path / "slurm_script"
        script.write_text("#!/bin/sh\nsleep 60 & wait\n")
        script.chmod(0o755)
        running = subprocess.Popen([script], start_new_session=True)
        try:
            deadline = time.monotonic() + scaled(20)
            while Path(f"/proc/{running.pid}/comm").read_text().strip() != "slurm_script":
                assert time.monotonic() < deadline
            assert job(TABLES["slurm"][0], SLURM_TASK_PID=str(running.pid)).name == "local"
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
        assert job(SLURM_TASK_PID=str(os.getpid())).name == "slurm"

    def test_one_task_may_start_more(self, job):
        one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
        assert job(TABLES["slurm"][0], one).name == "local"

    def test_torchhal_process_inside_step(self, job):
        """A process that torchhal started in a step is torchhal's."""
        assert job(TABLES["slurm"][1], TABLES["local"][2]).name == "local"

    @pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_NPROCS"])
    def test_exported_task_count_conflicts(self, job, name):
        """The error for an exported number of tasks shows it beside the step's."""
        with pytest.raises(ConfigurationError, match=rf"SLURM_STEP_NUM_TASKS=4, but {name}=8.*TORCHHAL_CLUSTER=none"):
            job(TABLES["slurm"][0], **{name: "8"}).world_size()

    def test_contradictions_show_both(self, job):
        environment = job(TABLES["slurm"][0], SLURM_STEP_TASKS_PER_NODE="2,1")
        with pytest.raises(ConfigurationError, match=r"NUM_TASKS=4, but SLURM_STEP_TASKS_PER_NODE=2,1 makes 3"):
            environment.validate_settings(num_devices=2, num_nodes=2)
        environment = job(SLURM_STEP_TASKS_PER_NODE="2(x2)")
        with pytest.raises(ConfigurationError, match=r"srun started 2 process.*4 device"):
            environment.validate_settings(num_devices=4, num_nodes=2)
        environment = job(SLURM_NODEID="7", SLURMD_NODENAME="n9")
        with pytest.raises(ConfigurationError, match=r"SLURM_NODEID=7.*counts 2 node"):
            environment.local_world_size()
        environment = job(SLURM_NODEID="0", SLURMD_NODENAME="n1", MASTER_ADDR="localhost")
        with pytest.raises(ConfigurationError, match=r"MASTER_ADDR must be an address.*'localhost'"):
            environment.validate_settings(num_devices=2, num_nodes=2)

    def test_unreadable_node_list_is_named(self, job):
        """The error for a node list that can't be read names it."""
        with pytest.raises(ConfigurationError, match=r"SLURM_STEP_NODELIST can't be read \(got 'n\[1-2\]-ib'\)"):
            _ = job(TABLES["slurm"][0], SLURM_STEP_NODELIST="n[1-2]-ib").main_address

    def test_ports_differ_between_steps(self, job):
        """Steps, jobs and restarts meet at ports of their own."""
        ports = set()
        for changes in (
            {}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "104711"}, {"SLURM_RESTART_COUNT": "1"}
        ):  # fmt: skip
            job(TABLES["slurm"][0], SLURM_JOB_ID="4711", SLURM_STEP_ID="0", SLURM_RESTART_COUNT=None)
            ports.add(job(**changes).main_port)
        assert len(ports) == 4
        assert all(1024 < port < 32768 for port in ports)


class TestRequeue:
    """The cycle itself runs on the real Slurm, in tests/test_clusters.py; here what it asks scontrol for."""

    @pytest.fixture
    def scontrol(self, tmp_path, monkeypatch):
        def install(status, says=""):
            program = tmp_path / "scontrol"
            ends = "" if status else "kill -TERM $PPID $$"  # as Slurm ends what it has put back, its scontrol too
            program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho '{says}' >&2\n{ends}\nexit {status}\n")
            program.chmod(0o755)
            return tmp_path / "asked"

        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return install

    def test_asked_for_and_for_its_signal_alone(self, job, scontrol, monkeypatch):
        job(TABLES["slurm"][0])
        asked = scontrol(0)
        assert SlurmEnvironment().run_again(signal.SIGUSR1, continues=True) == ""
        assert SlurmEnvironment(requeue=True).run_again(signal.SIGTERM, continues=True) == ""
        assert "ckpt_path='last'" in SlurmEnvironment(requeue=True).run_again(signal.SIGUSR1, continues=False)
        monkeypatch.setenv("TORCHHAL_REQUEUE", "0")
        assert SlurmEnvironment(requeue=True).run_again(signal.SIGUSR1, continues=True) == ""
        assert not asked.exists()
        monkeypatch.setenv("TORCHHAL_REQUEUE", "1")
        environment = SlurmEnvironment(requeue_signal="SIGUSR2")
        assert environment.stop_signals == (signal.SIGUSR2,)
        assert environment.run_again(signal.SIGUSR2, continues=True) == "job 4711 is requeued"
        assert asked.read_text() == "requeue 4711\n"

    @pytest.mark.parametrize("table", ["torchelastic", "openmpi", "mpich"])
    def test_belongs_to_the_job_whoever_started_the_ranks(self, job, scontrol, table):
        job(TABLES["slurm"][0], TABLES[table][1])  # mpirun's daemons, or torchrun, are what srun started
        environment = job(SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS="2", SLURM_NPROCS="2", TORCHHAL_REQUEUE="1")
        assert environment.name == table
        asked = scontrol(0)
        assert environment.stop_signals == (signal.SIGUSR1,)
        assert environment.run_again(signal.SIGUSR1, continues=True) == "job 4711 is requeued"
        assert asked.read_text() == "requeue 4711\n"

    def test_no_scheduler_signals_without_slurm(self, job):
        """Without Slurm nothing but SIGTERM and SIGINT ends a job."""
        environment = job(TABLES["openmpi"][1], TORCHHAL_REQUEUE="1")
        assert environment.stop_signals == ()
        assert environment.run_again(signal.SIGUSR1, continues=True) == ""

    @pytest.mark.parametrize("base", [SlurmEnvironment, LocalEnvironment])
    def test_an_environment_may_have_signals_of_its_own(self, job, base):
        class OfTheClass(base):
            stop_signals = (signal.SIGUSR2,)

        class OfTheObject(base):
            def __init__(self):
                super().__init__()
                self.stop_signals = [signal.SIGUSR2]

        job(TABLES["slurm"][0])
        assert OfTheClass().stop_signals == OfTheObject().stop_signals == (signal.SIGUSR2,)

    def test_invalid_requeue_switch_refused(self, job):
        """A requeue switch that is neither 1 nor 0 is refused before the training."""
        environment = job(TABLES["slurm"][0], TORCHHAL_REQUEUE="yes")
        with pytest.raises(ConfigurationError, match=r"TORCHHAL_REQUEUE must be 1 or 0.*'yes'"):
            environment.validate_settings(num_devices=2, num_nodes=2)

    def test_requeue_of_array_element(self, job, scontrol):
        """An element of a job array is requeued by its own name."""
        job(TABLES["slurm"][0], SLURM_ARRAY_JOB_ID="4711", SLURM_ARRAY_TASK_ID="3", SLURM_JOB_ID="4714")
        asked = scontrol(0)
        assert SlurmEnvironment(requeue=True).run_again(signal.SIGUSR1, continues=True) == "job 4711_3 is requeued"
        assert asked.read_text() == "requeue 4711_3\n"

    def test_what_goes_wrong_is_said_and_raises_nothing(self, job, scontrol, tmp_path, monkeypatch):
        job(TABLES["slurm"][0])
        scontrol(1, "Requested operation is presently disabled")
        again = SlurmEnvironment(requeue=True).run_again
        assert again(signal.SIGUSR1, continues=True) == (
            "job 4711 is not requeued: scontrol says 'Requested operation is presently disabled'"
        )
        (tmp_path / "scontrol").write_text("#!/bin/sh\nkill -KILL $$\n")
        assert "job 4711 may not be requeued: scontrol was ended by signal 9" in again(signal.SIGUSR1, continues=True)
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
        assert "there is no scontrol here" in again(signal.SIGUSR1, continues=True)

    @pytest.mark.parametrize("bad", ["SIGNOPE", 0, 9, "SIGSTOP", True, None])
    def test_nonsense(self, bad):
        with pytest.raises(ConfigurationError, match="'requeue_signal' must be a signal"):
            SlurmEnvironment(requeue_signal=bad)
        with pytest.raises(ConfigurationError, match="'requeue' must be a bool"):
            SlurmEnvironment(requeue="yes")


class TestNested:
    """The precedence of docs/how-to/clusters.md: the innermost launcher's word counts."""

    def test_torchrun_in_a_step(self, job):
        assert job(TABLES["slurm"][1], TABLES["torchelastic"][2]).name == "torchelastic"

    @pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
    def test_mpi_in_an_allocation(self, job, mpi):
        """Its daemons are the step's tasks: two nodes, one daemon each, two processes under each."""
        daemon = {**TABLES["slurm"][0], "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2",
                  "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
        assert job(daemon, TABLES[mpi][1]).name == mpi

    @pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
    def test_mpi_on_one_of_two_nodes(self, job, mpi):
        """As many processes as the step has daemons: the numbers on this node tell them apart."""
        size, local = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
        if mpi == "mpich":
            size, local = "PMI_SIZE", "MPI_LOCALNRANKS"
        daemon = {**TABLES["slurm"][0], "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2",
                  "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
        assert job(daemon, TABLES[mpi][1], {size: "2", local: "2"}).name == mpi

    def test_open_mpi_inside_partial_step(self, job):
        """Seen with three nodes and mpirun -np 2 -npernode 1 in the script: two daemons, on nodes 2 and 3, rank 1 under
        the first of them. Rank 0, on the script's own node, is in no step at all."""
        daemon = {**TABLES["slurm"][0], "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2",
                  "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}  # fmt: skip
        one = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1"}
        assert job(daemon, TABLES["openmpi"][1], one).name == "openmpi"

    def test_srun_with_pmi2(self, job):
        assert job(TABLES["slurm"][1], PMI_RANK="1", PMI_SIZE="4").name == "slurm"

    def test_flux_and_jsrun_precede_mpi(self, job):
        """Flux and jsrun win over the MPI variables that they set."""
        assert job(FLUX[1]).name == "flux"
        assert job(TABLES["openmpi"][1], TABLES["lsf"][1]).name == "lsf"


class TestSwitch:
    def test_none(self, job):
        assert job(TABLES["slurm"][1], TORCHHAL_CLUSTER="none").name == "local"

    def test_a_name(self, job):
        assert job(TABLES["slurm"][1], TABLES["torchelastic"][1], TORCHHAL_CLUSTER="slurm").name == "slurm"
        part = choose_environment({}, CPUAccelerator(), [])
        assert part.reason == "TORCHHAL_CLUSTER='slurm'"

    def test_chosen_environment_names_missing_variable(self, job):
        """An environment that did not start this process names the variable that it misses."""
        with pytest.raises(ConfigurationError, match="SLURM_STEP_NUM_TASKS must be set"):
            job(TORCHHAL_CLUSTER="slurm").world_size()

    def test_a_name_that_nobody_knows(self, job):
        with pytest.raises(UnknownAliasError, match=r"'slrum'(.|\n)*did you mean 'slurm'"):
            job(TORCHHAL_CLUSTER="slrum")

    def test_plugins_win(self, job):
        job(TORCHHAL_CLUSTER="slurm")
        assert choose_environment({"plugins=": "local"}, CPUAccelerator(), []).alias == "local"


class TestMPI:
    def test_one_host_needs_no_address(self, job):
        one_host = {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
        environment = job(TABLES["openmpi"][3], one_host)
        assert numbers(environment) == (3, 3, 0, 4, 4)
        assert environment.main_address == "127.0.0.1"
        first = environment.main_port
        assert job(PMIX_NAMESPACE="395575298").main_port != first

    @pytest.mark.parametrize(("mpi", "launcher"), [("openmpi", "mpirun"), ("mpich", "mpiexec")])
    def test_without_an_address_what_to_do_is_said(self, job, mpi, launcher, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        environment = job(TABLES[mpi][0])
        with pytest.raises(ConfigurationError, match=rf"MASTER_ADDR and MASTER_PORT must be set.*{launcher}.*mpi4py"):
            _ = environment.main_address

    def test_azure_address_and_port(self, job):
        """Azure's address and port stand in one variable."""
        environment = job(TABLES["openmpi"][3], AZ_BATCH_MASTER_NODE="10.0.0.4:6000")
        assert (environment.main_address, environment.main_port) == ("10.0.0.4", 6000)
        with pytest.raises(ConfigurationError, match=r"AZ_BATCH_MASTER_NODE must be 'address:port'.*'10.0.0.4'"):
            _ = job(AZ_BATCH_MASTER_NODE="10.0.0.4").main_address

    def test_pals_variables(self, job):
        """PALS sets the place on the node in its own variables."""
        place = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "NODE_RANK": "1", **BY_HAND}
        environment = job(place, PMI_RANK="3", PMI_SIZE="4")
        assert (environment.name, numbers(environment)) == ("mpich", (3, 1, 1, 4, 2))
        assert numbers(job(place, PMI_RANK=None, PMI_SIZE=None, PALS_SIZE="4")) == (3, 1, 1, 4, 2)
        with pytest.raises(ConfigurationError, match="MPI_LOCALNRANKS must be set"):
            job(PALS_LOCAL_SIZE=None).local_world_size()

    def test_one_process_may_start_more(self, job):
        assert job(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1").name == "local"


class TestLSF:
    def test_lsf_array_elements_apart(self, job):
        """The elements of LSF's array have one job number."""
        job(TABLES["lsf"][1])
        places = set()
        for index in (None, "0", "1", "2"):
            environment = job(LSB_JOBINDEX=index)
            places.add((environment.job_id(), environment.main_port))
        assert {name for name, _ in places} == {"LSF's job 815", "LSF's job 815[1]", "LSF's job 815[2]"}
        assert len({port for _, port in places}) == len(places) == 3

    def test_lsf_rank_file(self, job, tmp_path):
        """The first line of LSF's rank file is the launch node."""
        path = tmp_path / "ranks"
        path.write_text("batch4\n" + "d29n14\n" * 42 + "d29n15\n" * 42)
        environment = job(TABLES["lsf"][3], LSB_DJOB_RANKFILE=str(path))
        assert (environment.main_address, environment.global_rank(), environment.local_rank()) == ("d29n14", 3, 1)
        assert environment.main_port == job(TABLES["lsf"][0], LSB_DJOB_RANKFILE=str(path)).main_port
        path.write_text("\n")
        with pytest.raises(ConfigurationError, match=r"LSB_DJOB_RANKFILE is empty"):
            _ = environment.main_address


class TestFlux:
    def test_one_node(self, job):
        environment = job(FLUX[1])
        assert numbers(environment) == (1, 1, 0, 2, 2)
        assert environment.main_address == "127.0.0.1"
        environment.validate_settings(num_devices=2, num_nodes=1)

    def test_several_nodes_need_an_address(self, job):
        with pytest.raises(ConfigurationError, match=r"MASTER_ADDR must be set.*flux hostlist local"):
            _ = job(FLUX[1], FLUX_JOB_NNODES="2").main_address


class TestKubeflow:
    def test_a_process_per_pod(self, job):
        environment = job(TABLES["kubeflow"][2])
        assert numbers(environment) == (2, 0, 2, 4, 1)
        assert (environment.main_address, environment.main_port) == ("job-master-0", 23456)
        environment.validate_settings(num_devices=1, num_nodes=4)

    @pytest.mark.parametrize(
        "several",
        [{"PET_NPROC_PER_NODE": "4"}, {"NPROC_PER_NODE": "8"}, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}],
    )
    def test_several_processes_in_a_pod_are_torchruns(self, job, several):
        with pytest.raises(ConfigurationError, match=r"torchrun train\.py"):
            job(TABLES["kubeflow"][1], several).world_size()

    def test_trainer_v2_leaves_the_ranks_to_torchrun(self, job):
        with pytest.raises(ConfigurationError, match=r"PET_NNODES=2, but WORLD_SIZE isn't set.*torchrun"):
            job(TRAINER_V2).world_size()
        assert job(TRAINER_V2, TABLES["torchelastic"][1]).name == "torchelastic"
        assert job(TRAINER_V2, PET_NNODES="1", PET_NPROC_PER_NODE="1", TORCHELASTIC_RUN_ID=None, RANK=None,
                   LOCAL_RANK=None, WORLD_SIZE=None).name == "local"  # fmt: skip


class TestSageMaker:
    """Each host runs the script once: without SM_HOSTS' word each would train by itself."""

    HOSTS = {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "digits-7"}

    def test_the_hosts_are_the_nodes(self, job):
        environment = job(self.HOSTS)
        environment.configure(2, 4)
        assert (environment.name, environment.num_nodes(), environment.node_rank()) == ("sagemaker", 2, 1)
        assert (environment.global_rank(), environment.world_size(), environment.main_address) == (4, 8, "algo-1")
        other = job(SM_CURRENT_HOST="algo-1")
        other.configure(2, 4)
        assert (other.node_rank(), other.main_port) == (0, environment.main_port)
        assert environment.node_of(3) == 0

    def test_sagemaker_needs_num_nodes(self, job):
        """A SageMaker host that would train by itself is refused."""
        with pytest.raises(ConfigurationError, match=r"SM_HOSTS names the job's 2 hosts, but 1 node.*num_nodes=2"):
            job(self.HOSTS).configure(1, 4)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"SM_HOSTS": "algo-1,algo-2"}, r"SM_HOSTS must be a JSON list"),
            ({"SM_CURRENT_HOST": "algo-3"}, r"SM_CURRENT_HOST=algo-3 is none of SM_HOSTS"),
            ({"SM_CURRENT_HOST": None}, r"SM_CURRENT_HOST must be set"),
        ],
    )
    def test_garbled(self, job, changes, says):
        with pytest.raises(ConfigurationError, match=says):
            job(self.HOSTS, changes).configure(2, 4)

    def test_one_host_or_another_launcher(self, job):
        assert job(self.HOSTS, SM_HOSTS='["algo-1"]').name == "local"
        assert job(self.HOSTS, TABLES["torchelastic"][1]).name == "torchelastic"
        assert job(self.HOSTS, TABLES["openmpi"][1], TORCHELASTIC_RUN_ID=None, RANK=None).name == "openmpi"


class TestEnvContract:
    @pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
    def test_what_is_missing_is_named(self, job, name):
        environment = job(AZURE[1], **{name: None})
        with pytest.raises(ConfigurationError, match=f"{name} must be set"):
            _ = (environment.main_address, environment.main_port)

    def test_torch_s_four_variables_are_no_process_alone(self, job):
        """Enough for ``init_process_group``; each of them would train by itself."""
        environment = job(RANK="1", WORLD_SIZE="2", **BY_HAND)
        assert environment.name == "env"
        with pytest.raises(ConfigurationError, match=r"LOCAL_RANK must be set.*one of several"):
            environment.validate_settings(num_devices=1, num_nodes=2)

    def test_the_numbers_of_one_process_prove_nothing(self, job):
        assert job(BY_HAND).name == "local"
        assert job(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0").name == "local"


class TestWhoSharesAHost:
    def test_node_rank_order(self):
        """Nodes count in the order of their lowest rank."""
        hosts = ["b", "a", "b", "c", "a"]
        places = [topology_of(rank, hosts) for rank in range(5)]
        assert [(place.node_rank, place.local_rank, place.local_world_size) for place in places] == [
            (0, 0, 2), (1, 0, 2), (0, 1, 2), (2, 0, 1), (1, 1, 2),
        ]  # fmt: skip
        assert {place.num_nodes for place in places} == {3}

    def test_a_job_of_one_asks_nobody(self, job):
        environment = job(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", TORCHHAL_CLUSTER="env")
        assert gather_topology(environment).num_nodes == 1

    def test_a_copy_finds_out_for_itself(self, job):
        environment = job(FLUX[1])
        environment._place = topology_of(0, ["a"])
        assert pickle.loads(pickle.dumps(environment))._place is None


def test_ports_follow_the_whole_name():
    assert (
        len(
            {port_from_job_id("4711", str(step)) for step in range(50)}
            | {port_from_job_id(f"{n}4711", "0") for n in range(50)}
        )
        > 95
    )


def test_priorities_are_distinct():
    """Every built-in environment has a priority of its own."""
    entries = [entry for entry in registry.entries("cluster_environment") if entry.distribution == "torchhal"]
    priorities = [entry.load().priority for entry in entries]
    assert len(set(priorities)) == len(priorities) == 10
