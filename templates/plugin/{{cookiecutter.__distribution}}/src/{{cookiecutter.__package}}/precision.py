"""The precision with bfloat16 arithmetic and float32 weights for {{ cookiecutter.project_name }}."""

from __future__ import annotations

from torchhal.precision import MixedPrecision


class {{ cookiecutter.__class }}Precision(MixedPrecision):
    """Precision that uses torch's autocast to bfloat16.

    Override what the hardware wants differently: ``forward_context``, ``convert_module``, ``convert_input``,
    ``backward``, ``optimizer_step``; a loop never calls a method that nobody overrides.

    It works on every accelerator that has what it needs: arithmetic and autocast in its ``compute_dtype`` and weights
    in its ``param_dtype``. Where it uses something that only your hardware has, the property ``needs`` adds a word
    such as ``"acme:fp8"``, which the accelerator has in its ``capabilities``.
    """

    def __init__(self) -> None:
        super().__init__("bfloat16")
        self.alias = "{{ cookiecutter.__alias }}_bf16"
