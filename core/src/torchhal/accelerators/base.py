"""Define the accelerator contract: declarations first, default bodies over torch's own device modules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from torchhal.accelerators._declared_capabilities import DeclaredCapabilities
from torchhal.accelerators._devices import call_on_device, parse_devices
from torchhal.accelerators._profiling import DeviceProfiling
from torchhal.accelerators._statistics import DeviceStatistics
from torchhal.composition import Composable
from torchhal.errors import AcceleratorUnavailableError
from torchhal.plugin import Availability
from torchhal.pytree import move_to_device

_log = logging.getLogger(__name__)


class Accelerator(Composable, DeclaredCapabilities, DeviceStatistics, DeviceProfiling):
    """One kind of hardware.

    Hardware that torch already supports, in its tree or through PrivateUse1, is a subclass that sets :attr:`name`,
    :attr:`device_type` and perhaps :attr:`backend` and :attr:`capabilities`; every torch-native strategy, precision and
    checkpoint IO then works on it. Nothing is abstract. Override a method only where the device differs from what
    ``torch.get_device_module(device_type)`` does.

    Callers rely on this:

    * The class attributes are data and never change. Reading them, :meth:`availability`, :meth:`device_count` and
      :meth:`parse_devices` initialise no device: a fork after them works.
    * An instance holds no device state before :meth:`setup_device`, and pickles.
    * Everything from :meth:`setup_device` on is called in the process that trains, on every rank.

    Checks: GEN-02, GEN-19, ACC-01, ACC-04, ACC-17, ACC-56.
    """

    name: ClassVar[str]
    """Alias by which users name the accelerator.

    Checks: ACC-21.
    """

    device_type: ClassVar[str]
    """Device type of torch: ``torch.device(device_type)`` is valid once :meth:`load` has run.

    Checks: ACC-05, ACC-21.
    """

    backend: ClassVar[str] = "gloo"
    """Process-group backend for tensors on this device.

    Empty where there is none: strategies that need one are refused unless they bring their own.
    """

    indexed: ClassVar[bool] = True
    """True if a process addresses its device by index (``sim:1``); False for hardware with one device per process.

    Checks: ACC-05.
    """

    oversubscribable: ClassVar[bool] = False
    """True if more processes than devices make sense, as on the CPU."""

    default_strategy: ClassVar[str] = "single_device"
    """Alias of the strategy for one device when none is named."""

    default_parallel_strategy: ClassVar[str] = "ddp"
    """Alias of the strategy for several devices when none is named."""

    own_strategies: ClassVar[bool] = False
    """True if only strategies that name this accelerator in ``Strategy.accelerators`` drive it correctly.

    A strategy for all accelerators is then refused. For hardware that needs more from a loop than torch's operators and
    :meth:`step_marker`, such as gradients that its own library averages.
    """

    auto_priority: ClassVar[int | None] = 50
    """Priority in the choice of ``accelerator="auto"``, which takes the available one with the highest number.

    None: the accelerator is used only when it is named.
    """

    substitutes: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Aliases that replace general ones on this hardware: ``{kind: {alias: alias}}``.

    An example is its own launcher for ``ddp_spawn``. ``resolve`` applies it to names and defaults, never to objects.
    """

    start_methods: ClassVar[frozenset[str]] = frozenset({"spawn", "fork", "forkserver"})
    """Ways in which worker processes may start and still use the device.

    Checks: ACC-20.
    """

    visible_devices: ClassVar[str] = ""
    """Environment variable with which the vendor's runtime hides devices from a process.

    Empty: this class supports none.

    Checks: ACC-07.
    """

    features: ClassVar[frozenset[str]] = frozenset()
    """Capabilities beyond the core level, which ``torchhal_conformance`` then checks.

    ``"memory_stats"``: the counts of :meth:`memory_stats`. ``"visible_devices"``: only the devices that the variable
    :attr:`visible_devices` shows are counted. ``"threads"``: several threads, each with its own device.

    Checks: ACC-07, ACC-09, ACC-11, ACC-18, ACC-22.
    """

    # -- before anything starts ------------------------------------------------------------------------------

    @classmethod
    def load(cls) -> None:
        """Import the library that registers the device with torch.

        Idempotent; called before any probe. torch caches some results about a device for the process, so a library that
        is loaded after the first query is never detected.

        A seed that was set earlier reaches a PrivateUse1 device that this method registers: its module's
        ``manual_seed_all`` is called right afterwards, which starts no device, as ``torch.manual_seed`` calls it at any
        time. A device that ``torch.manual_seed`` doesn't reach has to be seeded here, with ``torch.initial_seed()``.

        Raises:
            ImportError: the vendor's library is missing. Any other error of the library is allowed too;
                :meth:`availability` turns it into a reason.
        """

    @classmethod
    def _register(cls) -> None:
        """Call :meth:`load`, then seed a device that it registered as ``torch.manual_seed`` would have.

        The seed is set here and never later: once the device exists, its generator is left to the user.
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
        """Return whether the hardware can be used in this process and, if not, why.

        Never raises, starts no device, and may be called any number of times.

        Returns:
            An :class:`~torchhal.plugin.Availability`; its ``reason`` is not empty where it is false.

        Checks: ACC-01, ACC-56, GEN-05.
        """
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
        """Raise an error unless the hardware can be used in this process.

        Raises:
            AcceleratorUnavailableError: it can't; the message holds the reason that :meth:`availability` gave.

        Checks: ACC-19.
        """
        availability = cls.availability()
        if not availability:
            raise AcceleratorUnavailableError(
                f"accelerator {cls.name!r} can't be used here: {availability.reason}; "
                "`torchhal doctor` lists what can, accelerator='auto' takes it",
                alias=cls.name,
                reason=availability.reason,
            )

    def device_count(self) -> int:
        """Return the number of devices this process can see, 0 without hardware; in a forked child, too.

        Checks: ACC-07, ACC-55, ACC-56.
        """
        if not type(self).availability():
            return 0
        return int(torch.get_device_module(self.device_type).device_count())

    def auto_device_count(self) -> int:
        """Return the number of devices that ``devices="auto"`` selects.

        At least 1 exactly where the hardware is available.

        Checks: ACC-06.
        """
        return self.device_count()

    def parse_devices(self, devices: int | str | Sequence[int]) -> tuple[int, ...]:
        """Return the device indices that ``devices`` selects, in the order given.

        The argument and the environment are left unchanged, and the result is itself a valid argument with the same
        meaning.

        Args:
            devices: ``"auto"`` for :meth:`auto_device_count` devices; ``n`` or ``"n"`` for the first n; ``-1`` or
                ``"-1"`` for all; ``[2, 0]`` or ``"2,0"`` for exactly these; ``"2,"`` for the one with index 2.

        Returns:
            Distinct indices from 0 to :meth:`device_count` - 1; empty for ``"auto"`` without hardware.

        Raises:
            ConfigurationError: (a ValueError) ``devices`` selects nothing that exists; names the value and the devices.
            AcceleratorUnavailableError: a valid request, but the hardware is not available here.

        Checks: ACC-02 to ACC-05, ACC-19, ACC-41.
        """
        return parse_devices(self, devices)

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        """Return the torch device of each index, in order.

        Args:
            indices: what :meth:`parse_devices` returned.

        Returns:
            As many devices of type :attr:`device_type`, without an index unless :attr:`indexed`.

        Checks: ACC-05.
        """
        if indices:
            self._register()  # torch may not support the type before
        if not self.indexed:
            return [torch.device(self.device_type)] * len(indices)
        return [torch.device(self.device_type, index) for index in indices]

    # -- in the training process -----------------------------------------------------------------------------

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` the current device of this process.

        Idempotent; called on every rank. Nothing is allocated on any other device. torch's defaults and switches, and
        the CPU's random state, are left unchanged here as in :meth:`setup` and :meth:`teardown`.

        Args:
            device: the root device of this rank.

        Raises:
            ValueError: ``device`` is of another type than :attr:`device_type`.
            AcceleratorUnavailableError: the hardware can't be used here; the message holds the reason.

        Checks: ACC-08, ACC-09, ACC-19, ACC-31.
        """
        if device.type != self.device_type:
            raise ValueError(
                f"'device' must be of type {self.device_type!r} for accelerator {self.name!r} (got {device})"
            )
        self.require_available()
        if device.index is not None and self.indexed:
            torch.get_device_module(self.device_type).set_device(device)

    def setup_process(self, *, global_rank: int, local_rank: int, world_size: int) -> None:
        """Receive this process's ranks before :meth:`setup_device`.

        Called on every rank by a strategy of several processes, for libraries that assign the device of a process by
        its rank. Does nothing by default.

        Args:
            global_rank: rank among all processes, 0 to ``world_size`` - 1.
            local_rank: rank among the processes of this node.
            world_size: number of processes of the job.
        """

    def step_marker(self) -> Callable[[], None] | None:
        """Return a function that makes the device execute the operators recorded so far, or None for an eager device.

        Called once on every rank, after :meth:`setup_device`. The strategy calls the function where a piece of work is
        complete: after each backward, after each optimizer step, and after each step without training or with manual
        optimization. A strategy of the hardware's own may choose other places.
        """
        return None

    def setup(self, trainer: Any = None) -> None:
        """Prepare for a run, after :meth:`setup_device` and before the model is moved.

        Called on every rank. Does nothing by default.

        Args:
            trainer: the Trainer of the run; None in a loop without one.
        """

    def teardown(self) -> None:
        """Release what :meth:`setup_device` took.

        Idempotent; called on every rank, and legal before a set-up or after one that failed. No more memory is
        allocated afterwards than before the set-up, and the process has the cores, signal handlers and working folder
        that it had.

        Checks: ACC-10, ACC-11, ACC-42, ACC-54.
        """
        if not type(self).availability():
            return
        try:
            self.empty_cache()
        except RuntimeError as error:  # a failed device raises again here; the first error is the one to report
            _log.warning("the cache of accelerator %r could not be emptied: %s", self.name, error)

    def batch_to_device(self, batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
        """Return ``batch`` with every tensor in it on ``device``.

        Called on every rank for each batch. Containers keep their types, an object with its own ``to`` is moved by
        that, and everything else is kept as it is; the given batch is not written to.

        Args:
            batch: tensors of any dtype, shape and strides, at any depth of containers.
            device: where the tensors go.
            non_blocking: do not wait for copies from pinned memory.

        Returns:
            The same structure; the tensors' values, dtypes and shapes are unchanged.

        Checks: ACC-12, ACC-13, ACC-50, ACC-51.
        """
        return move_to_device(batch, device, non_blocking=non_blocking)

    def process_dataloader(self, loader: Any, device: torch.device) -> Iterable[Any]:
        """Return what the loops iterate in place of ``loader``, whatever the strategy; the same loader by default.

        For a loader of the hardware's own around the given one, such as one that moves batches to the device ahead of
        time. Called on every rank for each loader of training, validation, test and prediction, after
        :meth:`.Strategy.process_dataloader` has returned it, and again for the rest of an epoch that a run continues.
        Loaders that can be read only once, such as generators, are not passed. The loops rely on this:

        * It gives the batches of ``loader``, all of them in their order, with their tensors on any device, each time
          it is iterated; several iterators may be open. ``len``, where it has one, is that of ``loader``.
        * ``iter()`` of it makes the iterator of ``loader`` before it returns, in the calling thread: that draws random
          numbers and starts worker processes. What ``loader`` raises, the iterator raises at that batch.
        * An iterator that is left before its end has its ``close()`` called, if it has one, as a generator does: it
          ends its threads and drops the loader's iterator. ``close()`` of the result, if it has one, is called at the
          end of the run.
        * The position in the data is counted in batches that a loop has taken. A run that continues in the midst of an
          epoch passes a ``loader`` that begins there, or takes and discards the batches before. If the result has
          ``state_dict`` and ``load_state_dict``, these are used instead: in the format of the loader's own, as of the
          batch that was handed out last. So a result that reads ahead must not forward the loader's.
        * A result that reads ahead of a loader without worker processes lets the dataset draw its random numbers in
          this process early; a continued run is bit for bit the same if it draws none, or has workers.

        Args:
            loader: a DataLoader with this rank's share, or any iterable of batches.
            device: the root device of this rank.

        Returns:
            An iterable of batches.

        Checks: ACC-28, ACC-50, ACC-52, ACC-53, ACC-70.

        .. versionadded:: 0.2
        """
        return loader  # type: ignore[no-any-return]

    def synchronize(self, device: torch.device | None = None) -> None:
        """Wait until all work submitted to the device is done.

        Args:
            device: the device to wait for; None for the current one.

        Checks: ACC-15.
        """
        call_on_device(self._module().synchronize, device)

    def empty_cache(self) -> None:
        """Return cached memory to the device, where its allocator caches."""
        empty = getattr(self._module(), "empty_cache", None)
        if empty is not None and self._initialised():
            empty()

    def manual_seed(self, seed: int) -> None:
        """Seed every generator of this device type.

        Args:
            seed: the same integer that ``torch.manual_seed`` takes.

        Checks: ACC-14, ACC-40.
        """
        module = self._module()
        seed_all = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
        if seed_all is not None:
            seed_all(seed)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of the device's random-number generator.

        Args:
            device: the device whose generator is read.

        Returns:
            A 1-d uint8 tensor on the CPU, for :meth:`set_rng_state`.

        Checks: ACC-14, ACC-40.
        """
        state: torch.Tensor = call_on_device(self._module().get_rng_state, device)
        return state

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        """Restore the state of the device's random-number generator.

        Args:
            state: what :meth:`get_rng_state` returned.
            device: the device whose generator is written.

        Checks: ACC-14, ACC-40.
        """
        call_on_device(self._module().set_rng_state, device, state)

    def set_benchmark(self, enabled: bool) -> None:
        """Enable or disable the search for the fastest kernels, where the device's library has such a switch.

        Args:
            enabled: True to time several kernels and keep the fastest.
        """

    def _module(self) -> Any:
        return torch.get_device_module(self.device_type)

    def _initialised(self) -> bool:
        is_initialized = getattr(self._module(), "is_initialized", None)
        return True if is_initialized is None else bool(is_initialized())

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
