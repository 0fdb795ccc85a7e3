"""GEN: whether a component can be used here, and with the others, before anything starts."""

from __future__ import annotations

import threading
import time
from typing import Any

from torchhal.accelerators import CPUAccelerator
from torchhal.checkpoint import TorchCheckpointIO
from torchhal.cluster import LocalEnvironment
from torchhal.composition import PARTS, Composition
from torchhal.errors import ConfigurationError
from torchhal.plugin import Availability
from torchhal.precision import SinglePrecision
from torchhal.resolve import check_fit
from torchhal.strategies import DDPStrategy
from torchhal_conformance._assertions import require, same
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext


@check("GEN-31", since="0.2")
def availability(context: CheckContext) -> None:
    """A class answers whether it can be used here by an Availability, again and again the same, in two seconds.

    Why: a bool has no reason, and an error in the answer ends the run of somebody who asked for another component.
    Fix: return Availability(False, reason) for whatever the vendor's library raises.
    """
    cls = context.component.cls
    first = cls.availability()  # may import the vendor's library
    started = time.monotonic()
    again = cls.availability()
    took = time.monotonic() - started
    for answer in (first, again):
        require(isinstance(answer, Availability), f"availability() must return an Availability (got {answer!r})")
    same("what availability() returns at the second call", again, first)
    require(took < 2, f"availability() took {took:.1f} s at the second call")


@check("GEN-32", since="0.2")
def composition(context: CheckContext) -> None:
    """check_fit accepts or refuses a composition, by a ConfigurationError, and does nothing else.

    It gives the same answer twice, changes no component, and starts no thread. Compositions are of one, two and three
    processes, on core's components beside this one.

    Why: it runs in the process that makes the Trainer, before a fork too, and for strategies that are never used.
    Fix: look at the composition's declarations; leave work to the set-up.
    """
    kind, component = context.component.kind, context.component.create()
    for processes in (1, 2, 3):
        parts: dict[str, Any] = {
            "accelerator": CPUAccelerator(),
            "precision": SinglePrecision(),
            "checkpoint_io": TorchCheckpointIO(),
            "cluster_environment": LocalEnvironment(),
            "strategy": DDPStrategy(),
        }
        if kind in PARTS:
            parts[kind] = component
        devices = CPUAccelerator().get_parallel_devices(range(processes))
        made = Composition(**parts, devices=devices, num_nodes=1, world_size=processes)
        asked = {**parts, kind: component}
        before = [dict(vars(part)) for part in asked.values()]
        threads = threading.active_count()
        answers = [_answer(kind, component, made) for _ in range(2)]
        same(f"the second answer for {processes} process(es)", answers[1], answers[0])
        for part, state in zip(asked.values(), before, strict=True):
            changed = sorted(name for name, value in vars(part).items() if state.get(name, part) is not value)
            require(not changed, f"check_fit changed {', '.join(changed)} of {type(part).__name__}")
        for name in PARTS:
            require(getattr(made, name) is parts[name], f"check_fit replaced {name}")
        require(threading.active_count() <= threads, "check_fit started a thread")


def _answer(kind: str, component: Any, made: Composition) -> str:
    try:
        check_fit(kind, component, made)
    except ConfigurationError as error:
        require("could not say whether it fits" not in str(error), str(error))
        return str(error)
    return ""
