"""Trains under fairscale what ``job_training`` does: ``train.py FOLDER strategy=OSS|SDP|Pipe [OPTION ...]``."""

from job_training import OPTIONS, TIMEOUT, train

if __name__ == "__main__":
    import torchhal_fairscale

    name = OPTIONS["strategy"]
    arguments = {} if name == "Pipe" else {"timeout": TIMEOUT}
    train(getattr(torchhal_fairscale, f"Fairscale{name}Strategy")(**arguments))
