"""Training on the stub: loss parity with plain PyTorch, marks, precisions, checkpoints, in one process and in two."""

from pathlib import Path

import pytest

ENGINE = Path(__file__).parent / "engine"


@pytest.mark.slow
def test_one_card_in_lazy_mode(python):
    python("single.py")


@pytest.mark.slow
def test_one_card_in_eager_mode(python):
    python("eager.py", PT_HPU_LAZY_MODE="0", PT_HPU_AUTOLOAD="0", PYTHONPATH=str(ENGINE))


def test_two_cards(python, tmp_path):
    told = python("parallel.py", tmp_path, HABANA_VISIBLE_MODULES="5,3", TORCHHAL_SIM_DEVICES="2")
    assert told.split() == ["HPUParallelStrategy", "HPUParallelStrategy", "FSDPStrategy", "ZeRO1Strategy", "resumed"]


@pytest.mark.slow
def test_two_cards_in_workers(python):
    assert "spawned" in python("spawned.py")
