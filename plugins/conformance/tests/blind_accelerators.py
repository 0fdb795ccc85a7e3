"""Accelerators of one defect each, written from the contract by somebody who had read no check."""

import torch
from sound_components import SameCPU
from zoo import caught_by

from torchhal.pytree import map_tensors


@caught_by("ACC-12")
class Float64Batch(SameCPU):
    """Moves float64 tensors of a batch as float32, as hardware without float64 would need them."""

    # accelerator.md, batch_to_device: "The same structure; the tensors' values, dtypes and shapes are unchanged."
    # Trains silently on rounded data.
    name = "float64_batch"

    def batch_to_device(self, batch, device, *, non_blocking=False):
        moved = super().batch_to_device(batch, device, non_blocking=non_blocking)
        return map_tensors(
            moved,
            lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64 else leaf,
        )


@caught_by("ACC-14")
class SeedOnlyState(SameCPU):
    """Saves of the generator what it was seeded with, not how far it has come."""

    # accelerator.md, set_rng_state: "Restore the state of the device's random-number generator." (state: "what
    # get_rng_state returned")
    # A resumed run silently repeats the random numbers from the start.
    name = "seed_only_state"

    def get_rng_state(self, device):
        return torch.tensor([torch.initial_seed() & (2**63 - 1)]).view(torch.uint8)

    def set_rng_state(self, state, device):
        torch.default_generator.manual_seed(state.view(torch.int64).item())


@caught_by("ACC-14")
class SharedStateBuffer(SameCPU):
    """Copies the generator's state into one host buffer that all calls return."""

    # accelerator.md, get_rng_state: "Return the state of the device's random-number generator. ... A 1-d uint8 tensor
    # on the CPU, for set_rng_state": what was returned first becomes the state of a later time.
    # A state that is kept while another is taken is silently the wrong one.
    name = "shared_state_buffer"
    _host = None

    def get_rng_state(self, device):
        now = super().get_rng_state(device)
        if self._host is None:
            self._host = torch.empty_like(now)
        return self._host.copy_(now)


@caught_by("ACC-02")
class CommaIsCount(SameCPU):
    """Drops a comma at the end of a request before it is parsed, so that "2," means two devices."""

    # accelerator.md, parse_devices: '"2," for the one with index 2'
    # The job runs silently on other devices, and on more of them.
    name = "comma_is_count"

    def parse_devices(self, devices):
        return super().parse_devices(devices.strip().rstrip(",") if isinstance(devices, str) else devices)


@caught_by("ACC-70")
class LazyIterator(SameCPU):
    """Wraps each loader in one that makes the loader's iterator when the first batch is asked for."""

    # accelerator.md, process_dataloader: "iter() of it makes the iterator of loader before it returns, in the calling
    # thread: that draws random numbers and starts worker processes."
    # The order of the random numbers is silently another one than with other hardware.
    name = "lazy_iterator"

    def process_dataloader(self, loader, device):
        return _Moving(self, loader, device)


class _Moving:
    def __init__(self, accelerator, loader, device):
        self.accelerator, self.loader, self.device = accelerator, loader, device

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for batch in self.loader:
            yield self.accelerator.batch_to_device(batch, self.device, non_blocking=True)


@caught_by("ACC-31")
class WarmUpDraws(SameCPU):
    """Warms the device up at the start of a run with a product of random matrices."""

    # accelerator.md, setup_device: "torch's defaults and switches, and the CPU's random state, are left unchanged here
    # as in setup and teardown."
    # The same seed silently gives another run.
    name = "warm_up_draws"

    def setup(self, trainer=None):
        super().setup(trainer)
        torch.randn(16, 16) @ torch.randn(16, 16)


@caught_by("ACC-10")
class TeardownNeedsSetUp(SameCPU):
    """Releases in teardown what only a set-up that succeeded has made."""

    # accelerator.md, teardown: "Idempotent; called on every rank, and legal before a set-up or after one that failed."
    # The AttributeError hides the error that ended the set-up.
    name = "teardown_needs_set_up"

    def setup_device(self, device):
        super().setup_device(device)
        self.queue = []

    def teardown(self):
        self.queue.clear()
        super().teardown()
