"""Trains under Colossal-AI what ``job_training`` does: ``train.py FOLDER [strategy=ddp|zero1|zero2] [OPTION ...]``."""

from job_training import OPTIONS, TIMEOUT, train

CHOSEN = {
    "ddp": {},
    "zero1": {"plugin": "low_level_zero"},
    "zero2": {"plugin": "low_level_zero", "options": {"stage": 2}},
}

if __name__ == "__main__":
    from torchhal_colossalai import ColossalAIStrategy

    train(ColossalAIStrategy(**CHOSEN[OPTIONS.get("strategy", "zero1")], timeout=TIMEOUT))
