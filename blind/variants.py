"""Second versions, written after the first results, of defects that were noticed for another reason than the defect."""

import os

import torch
from torchhal.strategies import SingleDeviceStrategy

from blind.environments import OwnHostname
from blind.parents import AcmeEnvironment, SameDDP, SameTrueBf16
from blind.strategies import AveragesTheLast


class AveragesTheLastAgain(AveragesTheLast):
    """AveragesTheLast, with a context that can be entered many times (that of the first one can't)."""

    def no_backward_sync(self):
        return _Pause(self)


class _Pause:
    def __init__(self, strategy):
        self.strategy = strategy

    def __enter__(self):
        self.strategy._paused = True

    def __exit__(self, *error):
        self.strategy._paused = False


class OwnNodename(OwnHostname):
    """OwnHostname without a call of the module socket, which ENV-17 counts as resolving a name."""

    name = "own_nodename"

    @property
    def main_address(self):
        return AcmeEnvironment.main_address.fget(self) and os.uname().nodename


class TeardownToFloat32(SameTrueBf16):
    """Sets the default dtype to float32 at the end, whatever it was before (TeardownToHighest with another switch)."""

    own_alias = "teardown_to_float32"

    def teardown(self):
        super().teardown()
        torch.set_default_dtype(torch.float32)


class SameSingle(SingleDeviceStrategy):
    """core's single_device, by another name."""


class TeardownInSequence(SameSingle):
    """Tears the components down one after the other, each once: an error in one leaves the rest as they are."""

    def teardown(self):
        self._release_model()
        for part in (self._checkpoint_io, self._precision, self.cluster_environment, self._accelerator):
            if part is not None:
                part.teardown()


class PassesOn(SameDDP):
    """No defect: overrides load_optimizer_state and calls the inherited one."""

    def load_optimizer_state(self, optimizer, state):
        super().load_optimizer_state(optimizer, state)
