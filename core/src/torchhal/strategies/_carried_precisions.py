"""Declare what a strategy needs of the backend, which precisions it can carry, and how exactly it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchhal._replaced_declarations import warn_replaced
from torchhal.precision import Precision


class CarriedPrecisions:
    """The capabilities of a strategy's class, and the list of precisions that they replace."""

    needs: frozenset[str] = frozenset()
    """Capabilities that the accelerator must have, from ``torchhal.capabilities``.

    Those of the form ``"collective:..."`` are the backend's, and are not asked for where the strategy's class was given
    a ``process_group_backend``.

    Checks: STR-37.
    """

    lacks: frozenset[str] = frozenset()
    """Capabilities that the strategy can't carry; a precision that needs one is refused.

    An engine that sends gradients in float32 and float16 only lacks the other dtypes::

        lacks = other_stores(torch.float32, torch.float16)

    Checks: STR-37.
    """

    precision_methods: ClassVar[frozenset[str] | None] = None
    """Names of the methods of ``Precision`` that are called under the strategy; None: all of them.

    For an engine that does some of their work itself: a precision that overrides another method is refused, with the
    method's name, as it would train in another way than the precision says. Methods that inherited bodies call, such as
    ``convert_module`` in :meth:`setup_model`, and those that the Trainer calls, such as ``state_dict``, are listed too.

    Checks: STR-36, STR-37.
    """

    implements_precisions: ClassVar[tuple[type[Precision], ...]] = ()
    """Classes of precisions whose work the strategy does itself, by the dtypes that they declare.

    The bodies that these classes give to methods outside :attr:`precision_methods` are no reason to refuse.

    Checks: STR-37.
    """

    tolerances: Mapping[str, float] = {}
    """Greatest differences from training in one process, of a strategy with ``"lossy"`` in its features.

    Each is absolute, or relative to the greatest expected value where that is above 1; the conformance checks take
    these in place of their own. ``"weights"``: of parameters after one to five steps of SGD with a learning rate of
    0.1. ``"losses"``: of the losses of 20 steps. ``"gradient_norm"``: of what ``clip_gradients`` returns.
    ``"replicas"``: of parameters between two ranks, which else are equal bit for bit.

    Checks: STR-14, STR-15, STR-17, STR-18, STR-20, STR-35, STR-47.
    """

    precisions: ClassVar[frozenset[str] | None] = None
    """Aliases of the precisions it works with, which :attr:`lacks` and :attr:`precision_methods` replace; None: any.

    A class that sets it gets a FutureWarning, and works with these precisions only.
    """

    _lists_precisions: ClassVar[bool] = False
    """True if the class that declares nearest sets ``precisions`` instead of what replaces it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if {"lacks", "precision_methods"} & set(vars(cls)):
            cls._lists_precisions = False
        elif vars(cls).get("precisions") is not None:
            warn_replaced(
                cls, "precisions", "declare 'lacks', the capabilities it can't carry, and 'precision_methods'"
            )
            cls._lists_precisions = True
