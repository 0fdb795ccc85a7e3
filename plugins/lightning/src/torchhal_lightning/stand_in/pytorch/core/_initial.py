"""Keep hyperparameters as they were saved."""

from __future__ import annotations

import copy
from typing import Any

from torchhal.trainer.adapters import HasHyperparameters


class InitialHyperparameters(HasHyperparameters):
    """Adds ``hparams_initial`` to the hyperparameters of a module or a data module."""

    @property
    def hparams(self) -> Any:
        """The saved constructor arguments, which may be changed."""
        found = super().hparams
        initial = self.__dict__.setdefault("_hparams_initial", {})
        for name in found.keys() - initial.keys():  # whoever changes one gets at it from here
            initial[name] = copy.deepcopy(found[name])
        return found

    @property
    def hparams_initial(self) -> Any:
        """A copy of them as they were when they were saved."""
        found = self.hparams
        return type(found)(copy.deepcopy(self.__dict__["_hparams_initial"]))
