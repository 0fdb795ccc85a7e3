"""Amazon SageMaker: a training job's hosts, on each of which the same script starts once."""

from __future__ import annotations

import json
from typing import ClassVar

from torchhal.cluster._env_vars import given, read_address, read_port, read_text
from torchhal.cluster._topology import port_from_job_id
from torchhal.cluster.local import LocalEnvironment
from torchhal.errors import ConfigurationError


class SageMakerEnvironment(LocalEnvironment):
    """A host of a training job with several, whose script was started by neither torchrun nor mpirun.

    torchhal starts this host's processes, and SM_HOSTS and SM_CURRENT_HOST name the hosts and this one. The ranks meet
    on the first of the sorted hosts, at MASTER_PORT or at a port derived from the job's name.

    Source: the environment variables of the SageMaker training toolkit.
    """

    name: ClassVar[str] = "sagemaker"
    priority: ClassVar[int] = 35

    @classmethod
    def detect(cls) -> bool:
        try:
            return len(_hosts()) > 1
        except ConfigurationError:
            return bool(given("SM_CURRENT_HOST"))  # garbled: raises when the numbers are read

    def validate_settings(self, *, num_devices: int, num_nodes: int) -> None:
        hosts = _hosts()
        if len(hosts) > 1 and num_nodes != len(hosts):
            raise ConfigurationError(
                f"SM_HOSTS names the job's {len(hosts)} hosts, but {num_nodes} node(s) are asked for (num_nodes), so "
                f"each host would train by itself: say num_nodes={len(hosts)} or num_nodes='auto', or "
                "TORCHHAL_CLUSTER=none for runs that have nothing to do with each other"
            )
        super().validate_settings(num_devices=num_devices, num_nodes=num_nodes)

    def num_nodes(self) -> int:
        return max(1, len(_hosts()))  # no variable, no job of several hosts

    def read_rendezvous(self) -> tuple[str, int]:
        address = read_address("MASTER_ADDR") if given("MASTER_ADDR") else _hosts()[0]
        port = read_port("MASTER_PORT") if given("MASTER_PORT") else port_from_job_id(given("TRAINING_JOB_NAME"))
        return address, port

    def read_node_rank(self) -> int:
        hosts, here = _hosts(), read_text("SM_CURRENT_HOST", hint="it is this host's name among SM_HOSTS")
        if here not in hosts:
            raise ConfigurationError(f"SM_CURRENT_HOST={here} is none of SM_HOSTS={given('SM_HOSTS')}")
        return hosts.index(here)


def _hosts() -> list[str]:
    text = given("SM_HOSTS") or "[]"
    try:
        hosts = json.loads(text)
        if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
            raise ValueError
    except ValueError:
        raise ConfigurationError(
            f"SM_HOSTS must be a JSON list of host names in the environment (got {text!r})"
        ) from None
    return sorted(hosts)
