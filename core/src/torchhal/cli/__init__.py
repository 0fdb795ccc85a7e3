"""The ``torchhal`` command: its sub-commands, and what those of a plugin print with."""

from torchhal._text_table import format_table
from torchhal.cli._main import main
from torchhal.cli._output import echo, output_to_stderr, print_json

__all__ = ["echo", "format_table", "main", "output_to_stderr", "print_json"]
