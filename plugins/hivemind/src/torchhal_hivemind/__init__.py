"""Decentralized training with hivemind: peers over the internet train one model, and come and go."""
