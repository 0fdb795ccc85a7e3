"""What the caller of a launch hears when its workers end in several ways at once."""

import signal

import pytest

from torchhal.distributed.signals import is_orderly
from torchhal.errors import RankFailedError
from torchhal.launchers.worker import failed, perform
from torchhal.launchers.worker_outcome import WorkerOutcomes

LEFT = SystemExit(128 + signal.SIGTERM)
FOR_WANT_OF_IT = RankFailedError("rank 0 called sys.exit(143)", rank=0)
OWN = ValueError("bad batch")


@pytest.fixture
def outcome():
    def outcome(received, *errors):
        verdict = WorkerOutcomes(len(errors), instead="")
        for rank, error in enumerate(errors):
            if error is not None:
                verdict.take(rank, failed(rank, error))
        try:
            verdict.raise_outcome(received)
        except BaseException as error:
            return error
        return None

    return outcome


@pytest.mark.parametrize("errors", [[None, None], [LEFT, LEFT], [LEFT, FOR_WANT_OF_IT], [LEFT, None]])
def test_signal_decides_exit_status(outcome, errors):
    """Also where a worker left before it trained, and the other one lost its peer."""
    assert outcome([signal.SIGTERM], *errors).code == 143
    interrupt = outcome([signal.SIGINT], *errors)
    assert isinstance(interrupt, KeyboardInterrupt)
    assert is_orderly(interrupt)  # no traceback of the launcher follows


def test_own_failure_outweighs_signal(outcome):
    """A failure of a worker's own counts more than the signal."""
    for errors in ([LEFT, OWN], [OWN, FOR_WANT_OF_IT], [OWN, LEFT]):
        assert "bad batch" in str(outcome([signal.SIGTERM], *errors))


def test_loss_elsewhere_outweighs_signal(outcome):
    """The signal does not explain the loss of a rank elsewhere."""
    elsewhere = RankFailedError("rank 3 failed", rank=3)
    assert isinstance(outcome([signal.SIGTERM], elsewhere, elsewhere), RankFailedError)


def test_status_without_signal(outcome):
    """Without a signal the outcomes of all ranks decide the job's."""
    assert outcome([], LEFT, LEFT).code == 143
    assert isinstance(outcome([], LEFT, FOR_WANT_OF_IT), RankFailedError)
    assert outcome([], None, None) is None


@pytest.mark.parametrize("stop", [KeyboardInterrupt, None])
def test_interrupt_while_loading_function(stop):
    """A Ctrl-C while a function is loaded is not reported as one that can't be loaded."""

    def read():
        raise stop or ImportError("nowhere")

    if stop is None:
        assert perform(read, None, settings=None, threads=None) == ("unreadable", "ImportError: nowhere")
    else:
        with pytest.raises(stop):
            perform(read, None, settings=None, threads=None)
