"""STR-59: what explain() makes of errors."""

from __future__ import annotations

from torchhal.errors import TorchhalError
from torchhal_conformance._assertions import require
from torchhal_conformance._check import check
from torchhal_conformance._rank_context import RankContext
from torchhal_conformance.checks._strategy_run import Regression, running


@check("STR-59", since="0.2", world_sizes=(1, 2), after=("STR-20",))
def explained_errors(rank: RankContext) -> None:
    """explain() returns an error for each that a step raised: a clearer one of torchhal's, or the same.

    The error of the user's own code is returned as it is.

    Why: a strategy that knew some messages returned nothing for all others, and the user read "exceptions must derive
    from BaseException".
    Fix: end explain() with ``return super().explain(error)``.
    """
    with running(rank, Regression(unused=True), may_refuse=True) as run:
        error: BaseException | None = None
        try:
            run.train(0, 2)
        except Exception as raised:
            error = raised
        told = rank.gather(repr(error))
        if error is not None:
            explained = run.strategy.explain(error)
            require(
                explained is error or isinstance(explained, TorchhalError),
                f"explain() of what a step with unused parameters raised returns {explained!r} (on the ranks: {told})",
            )
    with rank.set_up_strategy() as strategy:
        own = LookupError("no such word")
        explained = strategy.explain(own)
        require(explained is own, f"explain() of an error of the user's code returns {explained!r}")
        rank.gather("explained")
