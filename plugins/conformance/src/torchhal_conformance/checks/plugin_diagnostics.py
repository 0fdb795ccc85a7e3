"""GEN: what a component reports on its own installation."""

from __future__ import annotations

import time

from torchhal_conformance._assertions import require
from torchhal_conformance._check import check
from torchhal_conformance._context import CheckContext


@check("GEN-30", since="0.2")
def diagnostics(context: CheckContext) -> None:
    """A component reports on its installation in a list of sentences, a line each, without an error, in two seconds.

    Why: `torchhal doctor` asks all installed components at once, on a machine where something is wrong.
    Fix: catch what the vendor's library raises and say it in a sentence; start no device and no process.
    """
    started = time.monotonic()
    found = context.component.cls.diagnostics()
    took = time.monotonic() - started
    require(type(found) is list, f"diagnostics() must return a list (got {found!r})")
    for sentence in found:
        require(isinstance(sentence, str) and sentence.strip(), f"diagnostics() must return texts (got {sentence!r})")
        require(len(sentence.splitlines()) == 1, f"diagnostics() must return one line for each text (got {sentence!r})")
    require(took < 2, f"diagnostics() took {took:.1f} s")
