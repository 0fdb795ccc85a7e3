"""Provide ``torch.sim``: functions for devices, streams, random numbers and memory, by ``torch.cuda``'s names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from torchhal_simulator import __version__
from torchhal_simulator._device_types import Flavour


class DeviceProperties(NamedTuple):
    """The result of ``get_device_properties``."""

    name: str
    total_memory: int


class DeviceModule(ModuleType):
    """The module of one flavour.

    ``device`` arguments are an index, a name, a torch.device or None for the current.
    """

    __simulator__ = True
    __version__ = __version__

    # torch.utils.checkpoint keeps the random state of initialised devices only; this one has nothing to initialise.
    _initialized = True

    def __init__(self, flavour: Flavour, count: Any) -> None:
        super().__init__(f"torch.{flavour.device_type}", "A simulated accelerator (torchhal-simulator).")
        self._flavour = flavour
        self._ops = flavour.ops
        self._count = count
        device_type = flavour.device_type
        index = self._index

        class Stream(torch.Stream):
            """A stream of the simulated device: the current one's unless ``device`` says otherwise."""

            def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
                if kwargs:  # an existing stream by its ids
                    return super().__new__(cls, **kwargs)
                where = torch.device(device_type, index(device))
                return super().__new__(cls, device=where, priority=priority)

        self.Stream = Stream

    def _index(self, device: Any = None) -> int:
        if device is None:
            return int(self._ops.current_device())
        if isinstance(device, int):
            return device
        device = torch.device(device)
        if device.type != self._flavour.device_type:
            raise ValueError(f"'device' must be a {self._flavour.device_type} device (got {device})")
        return int(self._ops.current_device()) if device.index is None else int(device.index)

    # -- devices ---------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return int(self._count())

    def current_device(self) -> int:
        return int(self._ops.current_device())

    def set_device(self, device: Any) -> None:
        index = self._index(device)
        if not self._flavour.indexed and 0 <= index < self.device_count():
            index = 0  # DeviceMesh sets the device of LOCAL_RANK; whichever it is, the process has the one
        if index >= 0:
            self._ops.exchange_device(index)

    def _exchange_device(self, index: int) -> int:
        return int(self._ops.exchange_device(index)) if index >= 0 else -1

    _maybe_exchange_device = _exchange_device

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Make ``device`` the current one inside."""
        before = self._ops.exchange_device(self._index(device))
        try:
            yield
        finally:
            self._ops.exchange_device(before)

    def get_device_name(self, device: Any = None) -> str:
        return self.get_device_properties(device).name

    def get_device_properties(self, device: Any = None) -> DeviceProperties:
        return DeviceProperties(
            f"simulated {self._flavour.device_type} (torchhal-simulator {__version__} on torch {torch.__version__})",
            int(self._ops.memory_limit(self._index(device))),
        )

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return (0, 0)

    def can_device_access_peer(self, device: Any, peer_device: Any) -> bool:
        return True

    def is_initialized(self) -> bool:
        """Return True once anything has been allocated or run: a fork after that can't use the device."""
        return bool(self._ops.is_initialized())

    def init(self) -> None:
        """Do nothing: a device is taken by its first allocation."""

    _lazy_init = init

    def _is_in_bad_fork(self) -> bool:
        return bool(self._ops.is_in_bad_fork())

    # -- streams ---------------------------------------------------------------------------------------------

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        """Return an event of the simulated device (a function: torch.Event can't be subclassed)."""
        return torch.Event(
            self._flavour.device_type, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def synchronize(self, device: Any = None) -> None:
        self._ops.synchronize(self._index(device))

    def current_stream(self, device: Any = None) -> torch.Stream:
        return self._stream(index := self._index(device), int(self._ops.current_stream(index)))

    def default_stream(self, device: Any = None) -> torch.Stream:
        return self._stream(self._index(device), 0)

    def _stream(self, index: int, stream_id: int) -> torch.Stream:
        device_type = torch._C._autograd.DeviceType
        number = device_type.HPU if self._flavour.device_type == "hpu" else device_type.PrivateUse1
        return self.Stream(stream_id=stream_id, device_index=index, device_type=number.value)

    def set_stream(self, stream: torch.Stream) -> None:
        """Make ``stream`` the current one of its device."""
        self._ops.exchange_stream(stream.device_index, stream.stream_id)

    @contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        """Make ``stream`` the current one, and its device the current device, inside."""
        if stream is None:
            yield
            return
        device = self._ops.exchange_device(stream.device_index)
        before = self._ops.exchange_stream(stream.device_index, stream.stream_id)
        try:
            yield
        finally:
            self._ops.exchange_stream(stream.device_index, before)
            self._ops.exchange_device(device)

    # -- random numbers --------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        self._ops.manual_seed(self._index(), _signed(seed))

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self._indices()):
            self._ops.manual_seed(index, _signed(seed))

    def seed(self) -> int:
        return int(self._ops.seed(self._index())) % 2**64

    def seed_all(self) -> None:
        if self._indices():
            self.manual_seed_all(int(self._ops.seed(0)))

    def initial_seed(self) -> int:
        return int(self._ops.initial_seed(self._index())) % 2**64

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        state: torch.Tensor = self._ops.get_rng_state(self._index(device))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        self._ops.set_rng_state(self._index(device), new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(self._indices())]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def _indices(self) -> int:
        return int(self._ops.device_count())

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_allocated(self, device: Any = None) -> int:
        return int(self._ops.memory_stats(self._index(device))[0])

    def max_memory_allocated(self, device: Any = None) -> int:
        return int(self._ops.memory_stats(self._index(device))[1])

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return what ``torch.accelerator.memory_stats`` returns of its device, for each flavour, sorted by name.

        There are no pools, no segments beside the allocations, nothing is split, and the bytes that were requested
        are counted as those of the allocations.
        """
        current, peak, allocated, freed, allocations, frees, refusals = self._ops.memory_stats(self._index(device))
        if self._is_accelerator() and (told := torch.accelerator.memory_stats(self._index(device))):
            return dict(told)
        sizes = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
        count = {"current": allocations - frees, "peak": allocations - frees, "allocated": allocations, "freed": frees}
        stats = {"num_device_alloc": allocations, "num_device_free": frees, "num_ooms": refusals}
        stats |= dict.fromkeys(("max_split_size", "num_alloc_retries", "num_sync_all_streams"), 0)
        stats |= {f"oversize_{what}.{key}": 0 for what in ("allocations", "segments") for key in sizes}
        for names, values in (
            (("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"), sizes),
            (("allocation", "segment", "active"), count),
            (("inactive_split", "inactive_split_bytes"), dict.fromkeys(sizes, 0)),
        ):
            for name in names:
                for pool in ("all", "small_pool", "large_pool"):
                    stats |= {f"{name}.{pool}.{key}": n if pool == "all" else 0 for key, n in values.items()}
        return dict(sorted(stats.items()))

    def _is_accelerator(self) -> bool:
        accelerator = torch.accelerator.current_accelerator()
        return accelerator is not None and accelerator.type == self._flavour.device_type

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        self._ops.reset_peak_memory_stats(self._index(device))

    def reset_accumulated_memory_stats(self, device: Any = None) -> None:
        self._ops.reset_accumulated_memory_stats(self._index(device))

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return the bytes free and in all on the device."""
        limit = int(self._ops.memory_limit(index := self._index(device)))
        return max(0, limit - self.memory_allocated(index)), limit

    def empty_cache(self) -> None:
        """Do nothing: what is freed is given back at once."""

    # -- precision -------------------------------------------------------------------------------------------

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True


def _signed(seed: int) -> int:
    """Return a seed as the signed 64-bit integer that operators take.

    torch's seeds are unsigned, or negative for a large one.
    """
    seed = int(seed) % 2**64
    return seed - 2**64 if seed >= 2**63 else seed
