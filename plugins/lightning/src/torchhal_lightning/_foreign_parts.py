"""Checkpoint IOs and cluster environments that were written for Lightning, as torchhal's."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, ClassVar

import fsspec

from torchhal.checkpoint import CheckpointIO
from torchhal.cluster import ClusterEnvironment
from torchhal.errors import CheckpointError, ConfigurationError, message_of


class WrappedCheckpointIO(CheckpointIO):
    """A subclass of Lightning's CheckpointIO; what it promises of a save that is killed is its own affair.

    Args:
        io: with Lightning's ``save_checkpoint``, ``load_checkpoint``, ``remove_checkpoint`` and ``teardown``.
    """

    def __init__(self, io: Any) -> None:
        self.io = io

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        options = {} if storage_options is None else {"storage_options": storage_options}
        try:
            self.io.save_checkpoint(checkpoint, path, **options)
        except Exception as error:
            raise self._failed("save", path, error) from error

    def load_checkpoint(
        self, path: str | os.PathLike[str], *, map_location: Any = "cpu", weights_only: bool = True
    ) -> dict[str, Any]:
        options = {"map_location": map_location, "weights_only": weights_only}
        taken = inspect.signature(self.io.load_checkpoint).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            options = {name: value for name, value in options.items() if name in taken}
        try:
            loaded: dict[str, Any] = self.io.load_checkpoint(path, **options)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._failed("load", path, error) from error
        return loaded

    def _failed(self, what: str, path: Any, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{type(self.io).__name__} can't {what} {os.fspath(path)!r}: {type(error).__name__}: {message_of(error)}"
        )

    def exists(self, path: str | os.PathLike[str]) -> bool:
        files, place = fsspec.core.url_to_fs(os.fspath(path))
        found: bool = files.exists(place)  # a file or a folder, as the class pleases
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if self.exists(path):
            self.io.remove_checkpoint(path)

    def teardown(self) -> None:
        self.io.teardown()

    def __repr__(self) -> str:
        return repr(self.io)


class WrappedClusterEnvironment(ClusterEnvironment):
    """A subclass of Lightning's ClusterEnvironment whose processes something else has started.

    Lightning's contract says nothing about the processes of one node: there are as many on each.

    Args:
        environment: with Lightning's ``world_size()``, ``global_rank()``, ``main_address``, ...
        num_nodes: of the Trainer.

    Raises:
        ConfigurationError: the environment leaves it to the Trainer to start the processes.
    """

    name: ClassVar[str] = "lightning"

    def __init__(self, environment: Any, num_nodes: int) -> None:
        if not environment.creates_processes_externally:
            raise ConfigurationError(
                f"'plugins' can't hold {type(environment).__name__}, whose processes the Trainer has to start: leave "
                "it out, or write it as a subclass of torchhal.cluster.ClusterEnvironment"
            )
        self.environment = environment
        self._num_nodes = num_nodes

    @classmethod
    def detect(cls) -> bool:
        return False

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return int(self.environment.world_size())

    def global_rank(self) -> int:
        return int(self.environment.global_rank())

    def local_rank(self) -> int:
        return int(self.environment.local_rank())

    def node_rank(self) -> int:
        return int(self.environment.node_rank())

    def local_world_size(self) -> int:
        return max(1, self.world_size() // self._num_nodes)

    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def main_address(self) -> str:
        return str(self.environment.main_address)

    @property
    def main_port(self) -> int:
        return int(self.environment.main_port)

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        self.environment.validate_settings(num_devices, num_nodes)
        if num_devices * num_nodes != self.world_size():
            raise ConfigurationError(
                f"{type(self.environment).__name__} has {self.world_size()} process(es), and devices={num_devices} on "
                f"num_nodes={num_nodes} are {num_devices * num_nodes}"
            )

    def teardown(self) -> None:
        self.environment.teardown()

    def __repr__(self) -> str:
        return repr(self.environment)
