"""Hosts with names and networks of their own, and Slurm on them, all real: for tests of what runs on several hosts.

``tests/clusters`` makes the hosts from namespaces, without containers; it needs root and the packages that
``make cluster-tools`` installs. A test skips with the reason where something is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent / "clusters"
LAUNCHERS = ("SLURM", "OMPI", "PMI", "HYD", "MPI", "MASTER_", "TORCHHAL", "RAY_ADDRESS")
OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--mca", "plm_rsh_agent", str(TOOLS / "rsh"))
MPICH = ("mpiexec.hydra", "-launcher", "ssh", "-launcher-exec", str(TOOLS / "rsh"))


class Cluster:
    """Hosts n1, n2, ... and a head n0, where Slurm's controller runs. They share the disk, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = folder / "hosts"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, host: str, *command: str, **variables: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        process = subprocess.Popen(
            [str(TOOLS / "on"), str(self.hosts), host, *command],
            env={**kept, "CLUSTER_DIR": str(self.hosts), "OMP_NUM_THREADS": "1", **variables},
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, *command: str, host: str = "n0", timeout: float = 150, **variables: str) -> str:
        process = self.start(host, *command, **variables)
        said, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, said
        return said

    def captured(self, *command: str, variables: dict[str, str] | None = None) -> list[dict[str, str]]:
        """The environment of each process that ``command`` starts, without the test's own."""
        kept = Path(tempfile.mkdtemp(dir=self.folder))
        self.run(*command, "bash", "-c", f"env -0 > {kept}/$(hostname)-$$", timeout=60, **(variables or {}))
        found = [
            dict(line.split("=", 1) for line in path.read_text().split("\0") if "=" in line)
            for path in sorted(kept.iterdir())
        ]
        return [{name: row[name] for name in row if name.startswith(LAUNCHERS)} for row in found]

    def stop(self) -> None:
        for process in self._started:
            process.kill()
        subprocess.run([str(TOOLS / "hosts-down"), str(self.hosts)], timeout=60, check=False, capture_output=True)


def needs(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("environment: hosts of their own are made by root")
    missing = [name for name in programs if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")]
    if missing:
        pytest.skip(f"environment: {', '.join(missing)} not found; 'make cluster-tools' installs what this needs")


@contextmanager
def cluster_of(count: int) -> Iterator[Cluster]:
    """``count`` hosts, with Slurm on them where it is installed; all that lives in them is gone afterwards."""
    needs("ip", "unshare", "nsenter")
    with tempfile.TemporaryDirectory(prefix="torchhal-clusters-", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder))
        try:
            script = "slurm-up" if shutil.which("slurmctld", path="/usr/sbin:/sbin") else "hosts-up"
            up = subprocess.run(
                [str(TOOLS / script), str(made.hosts), str(count)], env={**os.environ, "SLURM_KILL_WAIT": "30"},
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            if up.returncode:
                pytest.skip(f"environment: no hosts can be made here: {up.stderr.strip()[-300:]}")
            yield made
        finally:
            made.stop()
