"""Errors travel between processes: a worker's to the caller, a rank's to the others."""

import inspect
import pickle

import pytest

from torchhal import errors
from torchhal.cluster.base import RanksNotMetError
from torchhal.distributed.failures import Failure
from torchhal.strategies import DDPStrategy

VALUES = {
    "kind": "precision", "alias": "fp9", "candidates": ["a:fp9", "b:fp9"], "names": ["max_epoch"], "reason": "absent",
    "rank": 3, "traceback": "Traceback", "stop_signal": 2, "name": "save", "missing": (1, 2),
}  # fmt: skip


def of_the_tree(kind=errors.TorchhalError):
    yield kind
    for derived in kind.__subclasses__():
        yield from of_the_tree(derived)


KINDS = sorted({RanksNotMetError, *of_the_tree()}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_pickle_keeps_class_message_and_attributes(kind, protocol):
    parameters = inspect.signature(kind.__init__).parameters.values()
    error = kind("it was 'x'", **{p.name: VALUES[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY})
    error.add_note("seen on rank 1")
    copy = pickle.loads(pickle.dumps(error, protocol))
    assert type(copy) is kind and str(copy) == str(error) == "it was 'x'"
    assert vars(copy) == vars(error) and copy.args == error.args


def test_an_error_that_a_user_derives_travels_too():
    error = Derived(["a", "b"])
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.lost) == (Derived, "lost a, b", ["a", "b"])


class Derived(errors.CheckpointError):
    def __init__(self, lost):
        super().__init__(f"lost {', '.join(lost)}")
        self.lost = lost


@pytest.mark.parametrize("base", [Exception, RuntimeError])
def test_unprintable_error_is_reported(base):
    """An error that can't be printed is still the one that is reported."""

    class Unprintable(base):
        def __str__(self):
            raise KeyError("no text")

    error = Unprintable()
    assert DDPStrategy().explain(error) is error
    failure = Failure.from_exception(1, error)
    assert failure.message == "failed: Unprintable: <its __str__ raised KeyError>"
    assert "Unprintable" in failure.text()
