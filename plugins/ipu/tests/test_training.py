"""Training on the stub, against plain PyTorch and, where IPUs can't, against the words of the error."""

import pytest
from tiers import slow


@pytest.mark.parametrize("half", ["0", slow("1")])
def test_training(python, half):
    assert "all right" in python("training.py", "--half", half)


def test_ctrl_c_and_a_loop_without_the_trainer(python):
    python("alone.py")


def test_a_loop_by_run(python):
    steps, difference = map(float, python("own_loop.py").split()[-2:])
    assert steps == 12 and difference < 2e-6
