"""ACC: what an accelerator declares of its devices, and how they are requested."""

from __future__ import annotations

import os
from collections import UserList
from functools import partial
from typing import Any

import torch

from torchhal.errors import AcceleratorUnavailableError
from torchhal.plugin import Availability
from torchhal_conformance._assertions import raises, require, same
from torchhal_conformance._check import NotApplicable, check
from torchhal_conformance._context import CheckContext


@check("ACC-01")
def stable_availability(context: CheckContext) -> None:
    """availability() never raises, is an Availability with a reason when false, and says the same when asked again.

    Why: a bare False, or a driver's exception, tells a user nothing, and "auto" would fall back without a word.
    Fix: catch what the vendor's import raises and return Availability(False, "what is missing").
    """
    first = context.component.cls.availability()
    require(isinstance(first, Availability), f"availability() must return an Availability (got {first!r})")
    require(first.ok or first.reason.strip(), "availability() is false without a reason")
    for _ in range(3):
        same("availability() asked again", context.component.cls.availability(), first)


@check("ACC-02", needs=["device"])
def equivalent_requests(context: CheckContext) -> None:
    """parse_devices means the same by n and "n", by [0, 1] and "0,1", by -1, "-1" and all, and knows "auto".

    Why: a command line gives strings where a script gives numbers, and both must get the same devices.
    Fix: override device_count or auto_device_count and inherit parse_devices.
    """
    accelerator = context.accelerator()
    count = accelerator.device_count()
    everything = tuple(range(count))
    pairs: list[tuple[Any, Any]] = [(1, "1"), (count, str(count)), (-1, "-1"), ([0], "0,")]
    if count > 1:
        pairs.append((list(everything), ",".join(map(str, everything))))
    for one, other in pairs:
        got = accelerator.parse_devices(one)
        require(isinstance(got, tuple), f"parse_devices({one!r}) must return a tuple (got {got!r})")
        same(f"parse_devices({other!r})", accelerator.parse_devices(other), got)
    same("parse_devices(1)", accelerator.parse_devices(1), (0,))
    same("parse_devices(-1)", accelerator.parse_devices(-1), everything)
    same("parse_devices('auto')", accelerator.parse_devices("auto"), tuple(range(accelerator.auto_device_count())))


@check("ACC-03", needs=["device"])
def nonsense(context: CheckContext) -> None:
    """parse_devices refuses what can't be meant with a ValueError or TypeError.

    Such are -2, 0, [], "", "0,0", True, 1.5, "a", [-1] and an index beyond the last. The error names the value and
    how many devices there are.

    Why: a job that starts on other devices than were asked for is noticed days later, if at all.
    Fix: inherit parse_devices, or raise ConfigurationError with the value's repr and device_count().
    """
    accelerator = context.accelerator()
    count = accelerator.device_count()
    values: list[Any] = [-2, 0, [], "", "0,0", [0, 0], True, 1.5, "a", [-1]]
    if not accelerator.oversubscribable:
        values += [[count], str(count + 1), count + 1]
    for value in values:
        ask = partial(accelerator.parse_devices, value)
        raises(f"parse_devices({value!r})", (ValueError, TypeError), ask, repr(value), str(count))


@check("ACC-04", needs=["device"], after=("ACC-02",))
def parsing_is_pure(context: CheckContext) -> None:
    """parse_devices leaves its argument and the environment alone, and takes its own result to mean itself.

    Any sequence of indices means the same as the list of them.

    Why: resolve asks several times; a list that was emptied, or a variable set on the way, changes the next answer.
    Fix: build a new tuple; don't sort or pop the caller's list, don't write os.environ.
    """
    accelerator = context.accelerator()
    request = list(range(accelerator.device_count()))[::-1]
    before, environ = list(request), dict(os.environ)
    once = accelerator.parse_devices(request)
    same("the caller's list", request, before)
    same("os.environ", dict(os.environ), environ)
    same("parse_devices of its own result", accelerator.parse_devices(once), once)
    same("parse_devices asked again", accelerator.parse_devices(request), once)
    for sequence in (tuple(request), range(len(request))[::-1], UserList(request)):
        same(f"parse_devices({sequence!r})", accelerator.parse_devices(sequence), once)


@check("ACC-05", needs=["device"])
def parallel_devices(context: CheckContext) -> None:
    """get_parallel_devices([2, 0]) is device 2, then device 0, each of device_type; without an index if not indexed.

    Why: renumbered devices put two jobs on one device and leave another idle.
    Fix: inherit it, or return torch.device(device_type, index) for each index in the order given.
    """
    accelerator = context.accelerator()
    for indices in ([2, 0], [0], [1, 2, 0]):
        expected = [
            torch.device(accelerator.device_type, i) if accelerator.indexed else torch.device(accelerator.device_type)
            for i in indices
        ]
        same(f"get_parallel_devices({indices})", list(accelerator.get_parallel_devices(indices)), expected)
    request = [1, 0] if accelerator.device_count() > 1 else [0]
    same(f"parse_devices({request})", accelerator.parse_devices(request), tuple(request))


@check("ACC-06", after=("ACC-01",))
def auto_count(context: CheckContext) -> None:
    """auto_device_count() is at least 1 exactly where the accelerator is available, and "auto" means that many devices.

    Why: a count that disagrees with the availability makes "auto" choose hardware that isn't there, or ignore it.
    Fix: return 0 from device_count() unless availability() is true.
    """
    accelerator = context.accelerator()
    available, count = type(accelerator).availability().ok, accelerator.auto_device_count()
    require((count >= 1) is available, f"auto_device_count() is {count}, but availability() says {available}")
    require(accelerator.device_count() >= 1 or not available, "available, but device_count() is 0")
    same("len(parse_devices('auto'))", len(accelerator.parse_devices("auto")), count)


@check("ACC-07", features=["visible_devices"], needs=["two devices"])
def visible_devices(context: CheckContext) -> None:
    """With the vendor's variable set to one device, one device is counted, and it has the logical index 0.

    The variable is the class attribute ``visible_devices``: without it the kit couldn't know which one to set.

    Why: schedulers hand out devices by this variable; physical numbers in its place point at other people's devices.
    Fix: count and number what the vendor's runtime shows, never what the machine has.
    """
    variable = context.component.cls.visible_devices
    require(variable, "the class attribute 'visible_devices' must name the vendor's variable")
    context.restart_subprocess()
    count, indices = context.run_in_subprocess(_count_visible, context.component, variable)
    context.restart_subprocess()
    same(f"device_count() with {variable}=1", count, 1)
    same(f"parse_devices(-1) with {variable}=1", indices, (0,))


def _count_visible(component: Any, variable: str) -> tuple[int, tuple[int, ...]]:
    os.environ[variable] = "1"
    accelerator = component.make_accelerator()
    accelerator.setup_device(accelerator.get_parallel_devices([0])[0])
    return accelerator.device_count(), accelerator.parse_devices(-1)


@check("ACC-08", needs=["device"])
def setup_device(context: CheckContext) -> None:
    """setup_device makes the device the current one, may be called again, and refuses another type with a ValueError.

    Why: code that says device="x" without an index works on device 0 by luck, and on every rank but one against it.
    Fix: compare device.type first, then call the vendor's set_device.
    """
    accelerator = context.accelerator()
    raises(
        "setup_device of the meta device", ValueError, lambda: accelerator.setup_device(torch.device("meta")), "meta"
    )
    last = max(accelerator.parse_devices(-1)) if accelerator.indexed else 0
    for index in dict.fromkeys((last, 0)):
        device = accelerator.get_parallel_devices([index])[0]
        for _ in range(2):
            accelerator.setup_device(device)
        made = torch.empty(1, device=accelerator.device_type).device
        same("device type of a tensor made after setup_device", made.type, device.type)
        if accelerator.indexed:
            same(f"index of a tensor made after setup_device({device})", made.index, index)


@check("ACC-09", features=["memory_stats"], needs=["two devices"])
def other_devices(context: CheckContext) -> None:
    """A process that is set up on device 1 allocates nothing on device 0.

    Why: every rank that opens a context on device 0 takes hundreds of megabytes of it, and rank 0 runs out first.
    Fix: call set_device before anything that makes a tensor, a stream or a handle.
    """
    if not context.accelerator().indexed:
        raise NotApplicable("a process of this accelerator has one device")
    context.restart_subprocess()
    allocated = context.run_in_subprocess(_allocated_on_first, context.component)
    context.restart_subprocess()
    same("bytes allocated on device 0 by work on device 1", allocated, 0)


def _allocated_on_first(component: Any) -> int:
    accelerator = component.make_accelerator()
    first, second = accelerator.get_parallel_devices([0, 1])
    accelerator.setup_device(second)
    accelerator.setup(None)
    torch.ones(1000, device=second).sum()
    accelerator.synchronize(second)
    return int(accelerator.memory_stats(first).get("allocated", 0))


@check("ACC-19", after=("ACC-01",))
def without_hardware(context: CheckContext) -> None:
    """Where the hardware is missing, what needs it raises AcceleratorUnavailableError with the reason.

    These are require_available, setup_device and parse_devices(1). On a machine that has the hardware, this is
    tried on a subclass that says it is missing.

    Why: "'NoneType' object has no attribute ..." from inside a vendor's library is no answer to "why not here".
    Fix: call super().setup_device(device), or require_available() first; return 0 from device_count() then.
    """
    cls = context.component.cls
    if cls.device_type == "cpu" and cls.oversubscribable:
        raise NotApplicable("the host's processors are always there")
    reason = cls.availability().reason
    if not reason:
        reason = "taken away for a check"
        members = {"availability": classmethod(lambda cls: Availability(False, reason)), "device_count": lambda self: 0}
        cls = type(cls.__name__, (cls,), members)
    accelerator = cls(**{**context.component.entry.component.defaults, **context.component.arguments})
    calls = {
        "require_available()": cls.require_available,
        "setup_device()": lambda: accelerator.setup_device(torch.device(cls.device_type)),
        "parse_devices(1)": lambda: accelerator.parse_devices(1),
    }
    for what, call in calls.items():
        raises(f"{what} without hardware", AcceleratorUnavailableError, call, reason)
    same("auto_device_count() without hardware", accelerator.auto_device_count(), 0)


@check("ACC-21")
def one_name(context: CheckContext) -> None:
    """The alias, ``name`` and the type of its devices agree, and repr() is one line.

    Why: messages name the accelerator by ``name`` and users ask for it by alias: two names send them looking.
    Fix: set ``name`` to the alias of the record, and ``device_type`` to torch's word for the device.
    """
    cls, entry = context.component.cls, context.component.entry
    names = {name.lower() for name in entry.names}
    require(cls.name in names, f"'name' is {cls.name!r}, but the record says {', '.join(sorted(names))}")
    text = repr(context.create())
    require(text.strip() and "\n" not in text, f"repr() must be one line (got {text!r})")
    if cls.availability():
        device = context.setup_accelerator()[1]
        same("the type of its devices", device.type, cls.device_type)
        same("the type of a tensor there", torch.empty(1, device=device).device.type, cls.device_type)
