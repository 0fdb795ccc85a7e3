"""Components whose answers before a launch, whether they can be used, are broken in one way."""

import threading

from zoo import caught_by

from torchhal.checkpoint import TorchCheckpointIO
from torchhal.errors import ConfigurationError
from torchhal.plugin import Availability
from torchhal.precision import SinglePrecision
from torchhal.strategies import DDPStrategy


@caught_by("GEN-31", kind="precision", says="must return an Availability (got True)")
class SaysTrue(SinglePrecision):
    @classmethod
    def availability(cls):
        return True


@caught_by("GEN-31", kind="checkpoint_io", says="no licence")
class Raises(TorchCheckpointIO):
    @classmethod
    def availability(cls):
        raise OSError("no licence")


@caught_by("GEN-31", kind="strategy", says="at the second call")
class ChangesItsMind(DDPStrategy):
    asked = 0

    @classmethod
    def availability(cls):
        cls.asked += 1
        return Availability(True) if cls.asked % 2 else Availability(False, "it was asked before")


@caught_by("GEN-32", kind="precision", says="AttributeError")
class ReadsWhatIsNotThere(SinglePrecision):
    def check_fit(self, composition):
        return composition.batch_size


@caught_by("GEN-32", kind="strategy", says="check_fit changed timeout of")
class SetsUp(DDPStrategy):
    def check_fit(self, composition):
        self.timeout = 3


@caught_by("GEN-32", kind="precision", says="second answer")
class RefusesOnce(SinglePrecision):
    def check_fit(self, composition):
        if not hasattr(type(self), "refused"):
            type(self).refused = True
            raise ConfigurationError("not the first time")


@caught_by("GEN-32", kind="checkpoint_io", says="started a thread")
class StartsToWrite(TorchCheckpointIO):
    def check_fit(self, composition):
        threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()


@caught_by("GEN-32", kind="precision", says="changed")
class ChangesOthers(SinglePrecision):
    def check_fit(self, composition):
        composition.strategy.timeout = 5
