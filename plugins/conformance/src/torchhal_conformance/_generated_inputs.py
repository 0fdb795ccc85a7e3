"""Run a check over corner cases and over examples that Hypothesis generates from the report's seed.

The same seed gives the same examples. A failure shows the smallest input that was found, in one line. Hypothesis stores
nothing and draws from no global generator.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from torchhal_conformance._check import CheckFailed, Skipped
from torchhal_conformance._limits import scaled
from torchhal_conformance._tensor_specs import ALL_DTYPES, CONTAINERS, NestSpec, TensorSpec, layouts_of

EXAMPLES: Final = 40
"""Generated examples of a check, beside its corner cases."""
SECONDS: Final = 4.0
"""Longest time for generating and shrinking; the corner cases always run."""


class _TimeOver(BaseException):
    """End of the time for examples; no Exception, which Hypothesis would take for a failure."""


def for_each(
    what: str,
    function: Callable[[Any], None],
    *,
    corners: Iterable[Any] = (),
    generated: Any = None,
    seed: int = 0,
    examples: int = EXAMPLES,
    seconds: float = SECONDS,
    agree: Callable[[str], Sequence[str]] | None = None,
) -> None:
    """Call ``function`` with each corner case and with generated examples; fail with the smallest input that fails.

    Args:
        what: the meaning of an input, for the message.
        function: raises CheckFailed, or anything else, for an input that breaks the rule.
        corners: inputs that always run, the smallest first.
        generated: a Hypothesis strategy of further inputs; None for the corner cases alone.
        seed: of the generated inputs.
        examples: the number of generated inputs; 0 for none.
        seconds: the time for them, with the shrinking of one that fails.
        agree: for a check of several ranks, returns the problems of all of them for this rank's problem, on every
            rank: all ranks then draw the same next input.

    Raises:
        CheckFailed: an input breaks the rule; the message ends with the input.
    """
    found: list[tuple[int, str]] = []

    def run(value: Any) -> str:
        problem = ""
        try:
            function(value)
        except Skipped:
            raise
        except CheckFailed as failure:
            problem = str(failure)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if agree is not None:
            others = [other for other in agree(problem) if other]
            problem = problem or (others[0] if others else "")
        if problem:
            shown = " ".join(repr(value).split())
            found.append((len(shown), f"{problem} [{what}: {shown}]"))
        return problem

    for corner in corners:
        if run(corner):
            break
    if not found and generated is not None and examples:
        _generate(run, generated, seed, examples, seconds, agree)
    if found:
        raise CheckFailed(min(found)[1])


def _generate(
    run: Callable[[Any], str],
    generated: Any,
    seed: int,
    examples: int,
    seconds: float,
    agree: Callable[[str], Sequence[str]] | None,
) -> None:
    """Let Hypothesis draw and shrink examples of ``generated`` for ``run``, until the time is over."""
    import hypothesis

    end = time.monotonic() + scaled(seconds)

    def body(value: Any) -> None:
        over = time.monotonic() > end
        if agree is not None:
            over = any(agree("over" if over else ""))
        if over:
            raise _TimeOver
        assert not run(value)

    settings = hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    state = random.getstate()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
            hypothesis.seed(seed)(settings(hypothesis.given(generated)(body)))()  # type: ignore[no-untyped-call]
    except (_TimeOver, AssertionError):
        pass
    finally:
        random.setstate(state)


# -- what Hypothesis draws from ------------------------------------------------------------------------------


def tensors(dtypes: Sequence[torch.dtype] = ALL_DTYPES, *, layouts: Sequence[str] | None = None) -> Any:
    """Return a Hypothesis strategy of :class:`TensorSpec` of at most three dimensions, empty and 0-d ones too."""
    from hypothesis import strategies as st

    def of(dtype: torch.dtype) -> Any:
        names = [name for name in layouts_of(dtype) if layouts is None or name in layouts]
        shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
        return st.builds(TensorSpec, st.just(dtype), shapes, st.sampled_from(names))

    return st.sampled_from(list(dtypes)).flatmap(of)


def nests(leaves: Any, *, containers: Sequence[str] = tuple(CONTAINERS)) -> Any:
    """Return a Hypothesis strategy of nests of ``leaves``, strings, numbers and None in ``containers``."""
    from hypothesis import strategies as st

    others = st.sampled_from(["text", 7, 1.5, True, None])

    def inside(children: Any) -> Any:
        return st.builds(NestSpec, st.sampled_from(list(containers)), st.lists(children, max_size=3).map(tuple))

    return st.recursive(leaves | others, inside, max_leaves=6).filter(lambda spec: isinstance(spec, NestSpec))
