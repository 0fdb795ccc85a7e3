"""The accelerator contract: a declaration first, default bodies over torch's own device modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from torchhal.accelerators._devices import parse_devices
from torchhal.errors import AcceleratorUnavailableError
from torchhal.plugin import Availability
from torchhal.pytree import move_to_device

_log = logging.getLogger(__name__)


class Accelerator:
    """One kind of hardware.

    Hardware that torch already speaks to, in its tree or through PrivateUse1, is a subclass that sets
    :attr:`name`, :attr:`device_type` and perhaps :attr:`backend` and :attr:`precisions`; every torch-native
    strategy, precision and checkpoint then works on it. Nothing is abstract. Override a method only where the
    device differs from what ``torch.get_device_module(device_type)`` does.

    Callers rely on this:

    * The class attributes are data and never change. Reading them, :meth:`availability`, :meth:`device_count` and
      :meth:`parse_devices` initialise no device: a fork after them works (GEN-02, ACC-01, ACC-04).
    * An instance holds no device state before :meth:`setup_device`, and pickles (GEN-19).
    * Everything from :meth:`setup_device` on is called in the process that trains, on every rank.
    """

    name: ClassVar[str]
    """The alias users write (ACC-21)."""

    device_type: ClassVar[str]
    """torch's device type: ``torch.device(device_type)`` is valid once :meth:`load` has run."""

    backend: ClassVar[str] = "gloo"
    """The process-group backend for tensors on this device. Empty: there is none, and strategies that need one are
    refused unless they bring it."""

    backend_averages: ClassVar[bool] = True
    """Whether the backend knows ``ReduceOp.AVG``; where it doesn't, strategies that use it sum and divide."""

    precisions: ClassVar[frozenset[str]] = frozenset({"32-true", "16-true", "16-mixed", "bf16-true", "bf16-mixed"})
    """Aliases of the precisions this device computes in; any other is refused before launch (ACC-16)."""

    indexed: ClassVar[bool] = True
    """Whether a process addresses its device by index (``sim:1``); False for hardware with one per process."""

    oversubscribable: ClassVar[bool] = False
    """Whether more processes than devices make sense (the CPU)."""

    default_strategy: ClassVar[str] = "single_device"
    """Alias of the strategy for one device when none is named."""

    default_parallel_strategy: ClassVar[str] = "ddp"
    """Alias of the strategy for several devices when none is named."""

    own_strategies: ClassVar[bool] = False
    """Whether only strategies that name this accelerator in ``Strategy.accelerators`` drive it right; one for all that
    torch speaks to is refused then. For hardware that wants more from a loop than torch's operators and
    :meth:`step_marker`, such as gradients that its own library averages."""

    auto_priority: ClassVar[int | None] = 50
    """``accelerator="auto"`` takes the available one with the highest number; None: only when named."""

    substitutes: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """``{kind: {alias: alias}}``: what a general alias means on this hardware, e.g. its own launcher for
    ``ddp_spawn``. Applied by ``resolve`` to names and defaults, never to objects."""

    start_methods: ClassVar[frozenset[str]] = frozenset({"spawn", "fork", "forkserver"})
    """Ways in which worker processes may start and still use the device."""

    visible_devices: ClassVar[str] = ""
    """The environment variable by which the vendor's runtime hides devices from a process; empty: there is none that
    this class answers for (ACC-07)."""

    features: ClassVar[frozenset[str]] = frozenset()
    """Capabilities beyond the core level, which ``torchhal_conformance`` then checks. ``"memory_stats"``: the counts
    of :meth:`memory_stats` (ACC-09, ACC-11, ACC-18). ``"visible_devices"``: only the devices that the variable shows
    are counted (ACC-07). ``"threads"``: several threads, each with its own device (ACC-22)."""

    # -- before anything starts ------------------------------------------------------------------------------

    @classmethod
    def load(cls) -> None:
        """Import whatever registers the device with torch. Idempotent; called before any probe.

        torch answers some questions about a device once and for all, so a library that loads after the first
        question is never seen. Raises ImportError or whatever the library raises; :meth:`availability` turns
        that into a reason.

        A seed that was set before reaches a PrivateUse1 device that this brings: its module's ``manual_seed_all`` is
        called right after, which starts no device, as ``torch.manual_seed`` calls it at any time. A device that
        ``torch.manual_seed`` doesn't know has to be seeded here, with ``torch.initial_seed()``.
        """

    @classmethod
    def _register(cls) -> None:
        """:meth:`load`, and the seed that ``torch.manual_seed`` would have given the device, had it known it.

        Never later: whatever is seeded or drawn once the device is there is the user's.
        """
        known = hasattr(torch, cls.device_type)
        cls.load()
        if known or cls.device_type != torch._C._get_privateuse1_backend_name():
            return
        module = getattr(torch, cls.device_type, None)
        seed_all, in_bad_fork = getattr(module, "manual_seed_all", None), getattr(module, "_is_in_bad_fork", None)
        if seed_all is not None and in_bad_fork is not None and not in_bad_fork():
            seed_all(torch.initial_seed())

    @classmethod
    def availability(cls) -> Availability:
        """Whether the hardware can be used here and, if not, why. Never raises, starts nothing (ACC-01, GEN-05)."""
        try:
            cls._register()
            module = torch.get_device_module(cls.device_type)
            available = bool(module.is_available())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a vendor's import may end in SystemExit
            return Availability(False, f"{type(error).__name__}: {error}")
        if not available:
            return Availability(False, f"torch reports no usable {cls.device_type} device on this machine")
        return Availability(True)

    @classmethod
    def require_available(cls) -> None:
        """Raise AcceleratorUnavailableError, with the reason, unless the hardware can be used here (ACC-19)."""
        availability = cls.availability()
        if not availability:
            raise AcceleratorUnavailableError(
                f"accelerator {cls.name!r} can't be used here: {availability.reason}; "
                "`torchhal doctor` lists what can, accelerator='auto' takes it",
                alias=cls.name,
                reason=availability.reason,
            )

    def device_count(self) -> int:
        """How many devices this process can see; 0 without hardware."""
        if not type(self).availability():
            return 0
        return int(torch.get_device_module(self.device_type).device_count())

    def auto_device_count(self) -> int:
        """How many devices ``devices="auto"`` means (ACC-06)."""
        return self.device_count()

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[int, ...]:
        """The indices that ``devices`` asks for, in the order given (ACC-02 to ACC-05).

        ``"auto"``: :meth:`auto_device_count` devices. ``n`` or ``"n"``: the first n. ``-1`` or ``"-1"``: all.
        ``[2, 0]`` or ``"2,0"``: exactly these; ``"2,"``: the one with index 2.

        Raises:
            ConfigurationError: (a ValueError) naming the value and what exists.
            AcceleratorUnavailableError: a sound request, but there is no such hardware here. ``"auto"`` is empty then.
        """
        return parse_devices(self, devices)

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        """The torch device of each index, in order (ACC-05)."""
        if indices:
            self._register()  # or torch may not know the type
        if not self.indexed:
            return [torch.device(self.device_type)] * len(indices)
        return [torch.device(self.device_type, index) for index in indices]

    # -- in the training process -----------------------------------------------------------------------------

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` the current one. Idempotent (ACC-08).

        Raises:
            ValueError: a device of another type.
            AcceleratorUnavailableError: the hardware can't be used here, with the reason (ACC-19).
        """
        if device.type != self.device_type:
            raise ValueError(
                f"'device' must be of type {self.device_type!r} for accelerator {self.name!r} (got {device})"
            )
        self.require_available()
        if device.index is not None and self.indexed:
            torch.get_device_module(self.device_type).set_device(device)

    def setup_process(self, *, global_rank: int, local_rank: int, world_size: int) -> None:
        """Hear which rank this process is, from a strategy of several, before :meth:`setup_device`.

        For libraries that give a process its device by its rank. Does nothing by default.
        """

    def step_marker(self) -> Callable[[], None] | None:
        """What makes the device begin with the operators recorded for it; None where it begins with each at once.

        Asked once, after :meth:`setup_device`. The strategy calls it where a piece of work is complete: after each
        backward, after each optimizer step, after each step without training or with manual optimization. One of the
        hardware's own may choose other places.
        """
        return None

    def setup(self, trainer: Any = None) -> None:
        """A hook after :meth:`setup_device`, before the model is moved. Does nothing by default."""

    def teardown(self) -> None:
        """Release what :meth:`setup_device` took. Idempotent, legal before or after a failed set-up (ACC-10)."""
        if not type(self).availability():
            return
        try:
            self.empty_cache()
        except RuntimeError as error:  # a device that failed says so again here; the first error is the one to see
            _log.warning("the cache of accelerator %r could not be emptied: %s", self.name, error)

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        """``batch`` with every tensor in it on ``device``; its structure is kept (ACC-12, ACC-13)."""
        return move_to_device(batch, device, non_blocking=non_blocking)

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until all work on the device is done (ACC-15)."""
        _call(self._module().synchronize, device)

    def empty_cache(self) -> None:
        """Give cached memory back to the device, where it caches."""
        empty = getattr(self._module(), "empty_cache", None)
        if empty is not None and self._initialised():
            empty()

    def manual_seed(self, seed: int) -> None:
        """Seed every generator of this device type (ACC-14)."""
        module = self._module()
        seed_all = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
        if seed_all is not None:
            seed_all(seed)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """The state of the device's generator: a uint8 tensor on the CPU (ACC-14)."""
        state: torch.Tensor = _call(self._module().get_rng_state, device)
        return state

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Put back what :meth:`get_rng_state` gave."""
        _call(self._module().set_rng_state, device, state)

    def set_benchmark(self, enabled: bool) -> None:
        """Let the device's library try several kernels and keep the fastest, where it has such a switch."""

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        """Bytes on ``device``: ``allocated``, ``peak`` and, where known, ``reserved``, ``limit`` (ACC-18).

        Empty where the device keeps no such count.
        """
        module, stats = self._module(), {}
        for key, function in (
            ("allocated", "memory_allocated"),
            ("peak", "max_memory_allocated"),
            ("reserved", "memory_reserved"),
        ):
            if (read := getattr(module, function, None)) is not None:
                stats[key] = int(_call(read, device))
        return stats

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """Start a new peak from the current allocation."""
        reset = getattr(self._module(), "reset_peak_memory_stats", None)
        if reset is not None:
            _call(reset, device)

    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)

    def _initialised(self) -> bool:
        is_initialized = getattr(self._module(), "is_initialized", None)
        return True if is_initialized is None else bool(is_initialized())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _call(function: Callable[..., Any], device: torch.device | None, *args: Any) -> Any:
    """``function(*args, device)``; without a device where it has no index: that is the current one, and the modules
    of hardware with one device per process have no such argument."""
    if device is None or device.index is None:
        return function(*args)
    return function(*args, device)
