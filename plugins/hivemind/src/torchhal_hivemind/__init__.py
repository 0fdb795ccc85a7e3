"""Decentralized training with hivemind: peers over the internet train one model, and come and go."""

__version__ = "0.1.0"
