"""The cluster environment of processes that {{ cookiecutter.vendor }}'s launcher starts."""

from __future__ import annotations

import os
from typing import ClassVar

from torchhal.cluster import ClusterEnvironment, read_address, read_int, read_port
from torchhal.errors import ConfigurationError

PREFIX = "{{ cookiecutter.__alias | upper }}_"


class {{ cookiecutter.__class }}Environment(ClusterEnvironment):
    """Cluster environment of a launcher that sets ``{{ cookiecutter.__alias | upper }}_RANK`` and others.

    Put the real names here, and into the tests. Numbers are read on each call, and nothing is written.
    """

    name: ClassVar[str] = "{{ cookiecutter.__alias }}"

    @classmethod
    def detect(cls) -> bool:
        return f"{PREFIX}RANK" in os.environ

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return read_int(f"{PREFIX}WORLD_SIZE", 1)

    def global_rank(self) -> int:
        return read_int(f"{PREFIX}RANK", 0, self.world_size() - 1)

    def local_rank(self) -> int:
        return read_int(f"{PREFIX}LOCAL_RANK", 0, self.local_world_size() - 1)

    def node_rank(self) -> int:
        return read_int(f"{PREFIX}NODE_RANK", 0, read_int(f"{PREFIX}NUM_NODES", 1) - 1)

    def local_world_size(self) -> int:
        return read_int(f"{PREFIX}LOCAL_WORLD_SIZE", 1, self.world_size())

    @property
    def main_address(self) -> str:
        return read_address(f"{PREFIX}MAIN_ADDRESS")

    @property
    def main_port(self) -> int:
        return read_port(f"{PREFIX}MAIN_PORT")

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        if self.local_world_size() != num_devices:
            raise ConfigurationError(
                f"the launcher started {self.local_world_size()} process(es) on this node, but {num_devices} device(s) "
                "are asked for: make both the same, or say devices='auto'"
            )
        if (nodes := read_int(f"{PREFIX}NUM_NODES", 1)) != num_nodes:
            raise ConfigurationError(
                f"the launcher started {nodes} node(s), but {num_nodes} node(s) are asked for (num_nodes): make both "
                "the same"
            )
