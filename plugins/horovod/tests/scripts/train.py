"""Trains under Horovod what ``job_training`` does: ``train.py FOLDER [OPTION ...]``."""

from job_training import TIMEOUT, train

if __name__ == "__main__":
    from torchhal_horovod import HorovodStrategy

    train(HorovodStrategy(timeout=TIMEOUT))
