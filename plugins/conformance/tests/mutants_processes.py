"""Parts that start, fail or end in a wrong way: strategies over ddp, cluster environments over torchrun's."""

import os
import pickle
import signal
import socket
import subprocess
import tempfile

import torch
import torch.distributed as dist
from zoo import caught_by

from torchhal.cluster import TorchElasticEnvironment
from torchhal.cluster._env_vars import read_int
from torchhal.strategies import DDPStrategy, SingleDeviceStrategy

SPAWN = {"arguments": {"start_method": "spawn"}}


@caught_by("STR-32", says="ended with 0")
class SwallowsFailures(DDPStrategy):
    """Its launcher ends the process as if all were well, whatever the function raises."""

    def make_launcher(self):
        launcher = super().make_launcher()
        launch = launcher.launch

        def quietly(function, *arguments):
            try:
                return launch(function, *arguments)
            except Exception:
                os._exit(0)

        launcher.launch = quietly
        return launcher


@caught_by("STR-32", "SYS-05", kind="strategy")
class LeavesAProcess(DDPStrategy):
    def setup_environment(self):
        super().setup_environment()
        subprocess.Popen(["sleep", "40"], start_new_session=True)


@caught_by("STR-33", **SPAWN)
class KeepsTheOldWeights(DDPStrategy):
    """Training went on in copies, and what rank 0 sends back is not taken."""

    def make_launcher(self):
        launcher = super().make_launcher()
        launch = launcher.launch

        def forgetful(function, trainer, *arguments):
            before = {name: value.clone() for name, value in trainer.module.state_dict().items()}
            return {**launch(function, trainer, *arguments), "state_dict": before}

        launcher.launch = forgetful
        return launcher


@caught_by("STR-33", **SPAWN)
class LeavesAFile(DDPStrategy):
    def make_launcher(self):
        os.close(tempfile.mkstemp()[0])
        return super().make_launcher()


@caught_by("STR-34", **SPAWN)
class FreshWorkers(DDPStrategy):
    """Its workers begin with torch's own settings."""

    def make_launcher(self):
        launcher = super().make_launcher()
        launch = launcher.launch

        def fresh(function, *arguments):
            state = torch.get_rng_state(), torch.get_default_dtype()
            torch.manual_seed(0)
            torch.set_default_dtype(torch.float32)
            try:
                return launch(function, *arguments)
            finally:
                torch.set_rng_state(state[0])
                torch.set_default_dtype(state[1])

        launcher.launch = fresh
        return launcher


@caught_by("STR-34", **SPAWN)
class SharesMemory(DDPStrategy):
    """A worker's write to a parameter changes the caller's."""

    def make_launcher(self):
        launcher = super().make_launcher()
        launch = launcher.launch

        def sharing(function, model):
            found = launch(function, model)
            with torch.no_grad():
                model.weight.fill_(5.0)
            return found

        launcher.launch = sharing
        return launcher


@caught_by("STR-40")
class TakesTheSignal(DDPStrategy):
    """Its own handler stands in the place of the one that asks for an orderly stop."""

    def setup_environment(self):
        super().setup_environment()
        signal.signal(signal.SIGTERM, lambda *_: os.write(2, b"SIGTERM is not for us\n") and self.done())

    def done(self):
        raise RuntimeError("stopped, somehow")


@caught_by("STR-40")
class KeepsItsHandler(DDPStrategy):
    def teardown(self):
        super().teardown()
        signal.signal(signal.SIGUSR2, lambda *_: None)


class Swarm(SingleDeviceStrategy):
    """Sound: who joins takes over the weights that the first process began with."""

    features = frozenset({"elastic"})

    def __init__(self, port=None, **parts):
        super().__init__(**parts)
        self.port, self.store, self.joining = port, None, {}

    def setup_optimizers(self, optimizers, lr_scheduler_configs=()):
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        first = self.port is None
        self.store = dist.TCPStore("127.0.0.1", self.port or 0, None, first, wait_for_workers=False)
        if first:
            self.store.set("weights", pickle.dumps(self.module.state_dict()))
            self.joining = {"port": self.store.port}
        else:
            self.module.load_state_dict(pickle.loads(self.store.get("weights")))

    def teardown(self):
        self.store, self.joining = None, {}
        super().teardown()


@caught_by("STR-43")
class KeepsItsOwn(Swarm):
    def setup_optimizers(self, optimizers, lr_scheduler_configs=()):
        own = {name: value.clone() for name, value in self.module.state_dict().items()}
        super().setup_optimizers(optimizers, lr_scheduler_configs)
        self.module.load_state_dict(own)


@caught_by("STR-44")
class OnePortForAll(DDPStrategy):
    """Both jobs of one check have one parent, so rank 0 of both wants the same port."""

    def setup_environment(self):
        super().setup_environment()
        if self.global_rank == 0:
            self.listener = socket.socket()
            self.listener.bind(("127.0.0.1", 20000 + os.getppid() % 10000))
            self.listener.listen()


@caught_by("SYS-05", kind="strategy")
class SavesNothing(DDPStrategy):
    def save_checkpoint(self, checkpoint, path, *, storage_options=None):
        self.barrier("nothing saved")


@caught_by("ENV-18", features={"launches"})
class BothAreFirst(TorchElasticEnvironment):
    """A local rank that counts from what another launcher sets."""

    def local_rank(self):
        return read_int("SLURM_LOCALID", 0)


@caught_by("ENV-19", says="LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2")
class CountsTheDead(TorchElasticEnvironment):
    def local_rank(self):
        return super().local_rank() + read_int("TORCHELASTIC_RESTART_COUNT", 0)
