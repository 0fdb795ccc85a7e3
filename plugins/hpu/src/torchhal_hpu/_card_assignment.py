"""Choose which of the machine's modules (cards) a process takes, in the variables that the bridge reads once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from torchhal.errors import ConfigurationError
from torchhal.vendor_package import restored_environ

_MODULE = "HLS_MODULE_ID"
_VISIBLE = "HABANA_VISIBLE_MODULES"
_CHOSEN_BY = "TORCHHAL_HPU_MODULE_CHOSEN_BY"  # the process that chose: its children inherit the variables
_RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ID")


class CardAssignment:
    """The module of this process and its place among the ranks, as the bridge reads them.

    The ranks' variables are there between :meth:`join` and :meth:`leave`: what runs later in this process must not
    take them for a launcher's. The module is the process's until it ends.
    """

    def __init__(self) -> None:
        self.indices: Sequence[int] = ()
        """The devices that were asked for, by local rank: indices into the visible modules."""
        self._variables: ExitStack | None = None  # what puts the ranks' variables back

    def join(self, *, global_rank: int, local_rank: int, world_size: int) -> None:
        """Take a module, and join the ranks as one of several.

        Raises:
            ConfigurationError: there is no module for this rank, or this process has opened another one.
        """
        from habana_frameworks.torch.distributed.hccl import initialize_distributed_hpu

        index = self.indices[local_rank] if local_rank < len(self.indices) else local_rank
        self._take(index, local_rank)
        if self._variables is None:
            self._variables = ExitStack()
            self._variables.enter_context(restored_environ(*_RANKS))
        initialize_distributed_hpu(world_size=world_size, rank=global_rank, local_rank=local_rank)

    @property
    def joined(self) -> bool:
        return self._variables is not None

    def alone(self) -> None:
        """Take a module as the only rank: the driver's choice unless another than the first device was requested."""
        if self.indices and self.indices[0]:
            self._take(self.indices[0], None)

    def _take(self, index: int, local_rank: int | None) -> None:
        import habana_frameworks.torch.hpu as hpu

        visible = os.environ.get(_VISIBLE)
        by_index = dict(enumerate(visible.split(","))) if visible else {}
        if visible and index not in by_index:
            raise ConfigurationError(
                f"{_VISIBLE}={visible!r} leaves no module for device {index}: name one for each device of this node"
            )
        module = by_index.get(index, str(index)).strip()
        now, chooser = os.environ.get(_MODULE), os.environ.get(_CHOSEN_BY)
        by_rank = None if local_rank is None else by_index.get(local_rank, str(local_rank)).strip()
        if chooser is None and now not in (None, by_rank):
            return  # the user's own; the bridge's import chooses by the local rank, where a launcher has set that
        if chooser == str(os.getpid()) and now not in (None, module) and hpu.is_initialized():
            raise ConfigurationError(
                f"this process has opened module {now} and keeps it, and the run asks for module {module}: use a new "
                "process"
            )
        os.environ.update({_MODULE: module, _CHOSEN_BY: str(os.getpid())})

    def leave(self) -> None:
        variables, self._variables = self._variables, None
        if variables is not None:
            variables.close()
