"""The precision with bfloat16 arithmetic and float32 weights for {{ cookiecutter.project_name }}."""

from __future__ import annotations

from typing import ClassVar

from torchhal.precision import MixedPrecision


class {{ cookiecutter.__class }}Precision(MixedPrecision):
    """Precision that uses torch's autocast to bfloat16.

    Override what the hardware wants differently: ``forward_context``, ``convert_module``, ``convert_input``,
    ``backward``, ``optimizer_step``; a loop never calls a method that nobody overrides.
    """

    # Any other accelerator is refused before a run starts; None takes all. "sim" is torchhal-simulator's, for tests.
    accelerators: ClassVar[frozenset[str] | None] = frozenset({"cpu", "sim"
{%- if 'accelerator' in cookiecutter.__kinds.split(',') %}, "{{ cookiecutter.__alias }}"{% endif %}})

    def __init__(self) -> None:
        super().__init__("bfloat16")
        self.alias = "{{ cookiecutter.__alias }}_bf16"
