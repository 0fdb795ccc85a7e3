"""Configure workers on a Ray cluster by ``plugins=``: how many, with which resources, and where."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torchhal.cluster import LocalEnvironment, read_int
from torchhal.composition import Composition
from torchhal.distributed.process import launched_by
from torchhal.errors import ConfigurationError, LaunchError
from torchhal.launchers import Launcher
from torchhal.plugin import Availability
from torchhal_ray import _config as settings
from torchhal_ray import _sdk as sdk

RESOURCES = {"cuda": "GPU", "xpu": "GPU", "npu": "NPU", "hpu": "HPU", "xla": "TPU"}
"""What Ray calls the devices of a torch device type. CPU cores are asked for anyway."""


class RayEnvironment(LocalEnvironment):
    """Workers as actors on a Ray cluster: that which this program is connected to, or ``ray.init`` finds or starts.

    Two ways to say how many:

    * ``Trainer(devices=d, num_nodes=n, plugins="ray")``: d workers on each of n nodes;
    * ``Trainer(plugins=RayEnvironment(num_workers=w))``: w workers in all, one device each, on whichever nodes
      ``placement`` leads to; nodes may differ in number.

    Model, data and callbacks go to the workers by cloudpickle; the trained weights, the callbacks' states, the metrics
    and the result of rank 0 come back. This process waits and is no rank. Ranks count node for node, beginning with
    this process's own where it has workers. In a worker, an object of this class reads the variables that it was
    started with.

    Args:
        num_workers: workers in all; None: one for each of ``devices`` on each of ``num_nodes``.
        resources_per_worker: Ray's names and amounts, such as ``{"CPU": 4, "GPU": 1}``. None: one CPU, and one of the
            accelerator's devices.
        placement: with ``num_workers``, Ray's strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        timeout: seconds to wait for room on the cluster.
        stop_timeout: seconds between a signal to this process and the workers' forced end.
        runtime_env: Ray's runtime environment of the workers, such as ``{"env_vars": {...}}``. This process's
            ``TORCHHAL_`` variables are passed anyway.
        init: arguments of ``ray.init`` if this program isn't connected yet, such as ``{"address": "auto"}``.

    Raises:
        ConfigurationError: an argument outside its domain.
    """

    name: ClassVar[str] = "ray"
    priority: ClassVar[int] = 10
    features: ClassVar[frozenset[str]] = frozenset({"owns_launch"})

    @classmethod
    def availability(cls) -> Availability:
        return sdk.RAY.availability()

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        resources_per_worker: Mapping[str, float] | None = None,
        placement: str = "PACK",
        timeout: float = 60.0,
        stop_timeout: float = 60.0,
        runtime_env: Mapping[str, Any] | None = None,
        init: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        settings.check(
            num_workers=num_workers,
            placement=placement,
            timeout=timeout,
            stop_timeout=stop_timeout,
            runtime_env=runtime_env,
            init=init,
        )
        self.num_workers = num_workers
        self.resources_per_worker = (
            None if resources_per_worker is None else settings.check_resources(resources_per_worker)
        )
        self.placement = placement
        self.timeout = timeout
        self.stop_timeout = stop_timeout
        self.runtime_env = dict(runtime_env or {})
        self.init = dict(init or {})
        self._asked = (1, 1)

    def check_fit(self, composition: Composition) -> None:
        if self.num_workers is None:
            per_node = composition.strategy.num_local_processes(len(composition.devices))
            self._check_one_device_each(self._resources(composition.accelerator.device_type), per_node)

    @classmethod
    def detect(cls) -> bool:
        return launched_by() == cls.name

    @property
    def creates_processes_externally(self) -> bool:
        return self.detect()

    def configure(self, num_nodes: int, local_world_size: int) -> None:
        for name, value in (("num_nodes", num_nodes), ("local_world_size", local_world_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"'{name}' must be an int of at least 1 (got {value!r})")
        self.validate_settings(num_devices=local_world_size, num_nodes=num_nodes)
        self._asked = (num_nodes, local_world_size)

    def num_nodes(self) -> int:
        # Ray decides how many workers a node has, so the launcher counts the nodes.
        counted = self.detect() and "NNODES" in os.environ
        return read_int("NNODES", 1, self.world_size()) if counted else super().num_nodes()

    def node_of(self, rank: int) -> int | None:
        """Return the node of a rank here, or on the other one of two; None for more nodes, which may differ in size."""
        first, size = self.global_rank() - self.local_rank(), self.local_world_size()
        if self.world_size() == size:
            return None
        if first <= rank < first + size:
            return self.node_rank()
        return 1 - self.node_rank() if self.num_nodes() == 2 else None

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        if self.num_workers is None:
            super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)
            return
        if num_devices > 1 or num_nodes > 1:
            raise ConfigurationError(
                f"the number of processes is given twice: num_workers={self.num_workers} (RayEnvironment), and "
                f"{num_devices} device(s) on each of {num_nodes} node(s) (devices=, num_nodes=); leave one of them out"
            )
        if self._launched() and self.world_size() != self.num_workers:
            raise ConfigurationError(
                f"this process was launched as one of {self.world_size()}, but num_workers={self.num_workers} is asked "
                "for"
            )

    def make_launcher(self, *, device_type: str, prepare: Callable[[], None]) -> Launcher:
        if (starter := launched_by()) is not None:
            raise LaunchError(
                f"this is one of several processes that {starter!r} has started, and each would start workers on Ray: "
                "keep to the first Trainer's way of starting processes"
            )
        from torchhal_ray._actor_launcher import ActorLauncher

        resources = self._resources(device_type)
        num_nodes, per_node = self._asked
        self._check_one_device_each(resources, per_node)
        return ActorLauncher(self, resources, prepare, num_nodes=num_nodes, per_node=per_node)

    def _resources(self, device_type: str) -> Mapping[str, float]:
        """Return what Ray reserves for each worker: what the user has given, or a CPU and a device."""
        if self.resources_per_worker is not None:
            return self.resources_per_worker
        device = RESOURCES.get(device_type)
        return {"CPU": 1.0, **({} if device is None else {device: 1.0})}

    def _check_one_device_each(self, resources: Mapping[str, float], per_node: int) -> None:
        split = {name: amount for name, amount in resources.items() if name in RESOURCES.values() and amount != 1}
        if per_node > 1 and split:
            raise ConfigurationError(
                f"'resources_per_worker' must give each of {per_node} workers of a node one device (got {split}): with "
                "num_workers= in place of devices= a worker may have several, or share one"
            )

    def __repr__(self) -> str:
        return f"RayEnvironment(num_workers={self.num_workers}, placement={self.placement!r})"
