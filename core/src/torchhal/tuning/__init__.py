"""Find a learning rate or a batch size by short trial runs, before a fit.

.. versionadded:: 0.2
"""

from torchhal.trainer._fields import find_field, set_field
from torchhal.tuning._batch_size import find_batch_size
from torchhal.tuning._batch_size_search import search_batch_size
from torchhal.tuning._learning_rate import find_learning_rate
from torchhal.tuning._learning_rates import LearningRates
from torchhal.tuning._range_test import RangeTest

__all__ = [
    "LearningRates",
    "RangeTest",
    "find_batch_size",
    "find_field",
    "find_learning_rate",
    "search_batch_size",
    "set_field",
]
