"""Sub-commands of ``torchhal`` that stand apart from cli.py."""
