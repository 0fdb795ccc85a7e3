"""ACC: requests and teardown where the hardware is missing or has failed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from torchhal.accelerators import Accelerator
from torchhal.errors import AcceleratorUnavailableError
from torchhal.plugin import Availability
from torchhal_conformance._assertions import raises, same
from torchhal_conformance._check import CheckFailed, NotApplicable, check
from torchhal_conformance._context import CheckContext


def _create(context: CheckContext, members: dict[str, Any]) -> Accelerator:
    """Return an instance of a subclass with these members."""
    cls = context.component.cls
    made = type(cls.__name__, (cls,), members)
    found: Accelerator = made(**{**context.component.entry.component.defaults, **context.component.arguments})
    return found


@check("ACC-41", since="0.2")
def requests_without_hardware(context: CheckContext) -> None:
    """Without hardware each valid request for devices is an AcceleratorUnavailableError with the reason.

    Requests are counts, indices, and -1; "auto" selects nothing.

    Why: "index 0 of 0 devices" doesn't say that the driver is missing.
    Fix: call require_available() where no device is counted.
    """
    cls = context.component.cls
    if cls.device_type == "cpu" and cls.oversubscribable:
        raise NotApplicable("the host's processors are always there")
    reason = cls.availability().reason
    members: dict[str, Any] = {}
    if not reason:
        reason = "taken away for a check"
        members = {"availability": classmethod(lambda cls: Availability(False, reason)), "device_count": lambda self: 0}
    accelerator = _create(context, members)
    for request in (2, "1", -1, "-1", [0], [1, 0], "0,1"):
        what = f"parse_devices({request!r}) without hardware"
        raises(what, AcceleratorUnavailableError, lambda request=request: accelerator.parse_devices(request), reason)  # type: ignore[misc]
    same("parse_devices('auto') without hardware", accelerator.parse_devices("auto"), ())


@check("ACC-71", since="0.2", needs=["device"])
def out_of_memory(context: CheckContext) -> None:
    """is_out_of_memory recognises what an allocation beyond all memory raises, also as another error's cause.

    It is False for an error of another kind, and the device works on after the allocation.

    Why: a search for a batch size goes on after it. One that isn't recognised ends the search; a defect of the model
    that is taken for it goes unseen.
    Fix: add the words of the vendor's library to super().is_out_of_memory(error).
    """
    accelerator, device = context.setup_accelerator()
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
        accelerator.synchronize(device)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        same(f"is_out_of_memory of what a pebibyte raises, {said}", accelerator.is_out_of_memory(error), True)
        outer = ValueError("the step has failed")
        outer.__cause__ = error
        same("is_out_of_memory of an error that it has caused", accelerator.is_out_of_memory(outer), True)
    for memory in (torch.OutOfMemoryError("Tried to allocate 1 GiB"), MemoryError()):
        same(f"is_out_of_memory of {memory!r}", accelerator.is_out_of_memory(memory), True)
    for other in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("memory"), ZeroDivisionError()):
        same(f"is_out_of_memory of {other!r}", accelerator.is_out_of_memory(other), False)
    moved = accelerator.batch_to_device(torch.arange(3.0), device)
    same("a sum on the device after it", float((moved + 1).sum()), 6.0)


@contextlib.contextmanager
def _without_log() -> Iterator[None]:
    log = logging.getLogger(Accelerator.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@check("ACC-42", since="0.2", needs=["device"])
def teardown_of_a_failed_device(context: CheckContext) -> None:
    """teardown() doesn't raise where the device fails again in it.

    Why: the error of the teardown hides the one that ended the run.
    Fix: report what the device says there, and go on.
    """

    def fail(self: Any) -> None:
        raise RuntimeError("the device has failed")

    accelerator = _create(context, {"empty_cache": fail, "synchronize": lambda self, device=None: fail(self)})
    accelerator.setup_device(accelerator.get_parallel_devices([0])[0])
    try:
        with _without_log():  # core's teardown logs the failure, which is the kit's own
            accelerator.teardown()
    except Exception as error:
        raise CheckFailed(f"teardown() of a failed device raised {type(error).__name__}: {error}") from error
