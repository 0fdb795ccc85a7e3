"""The precision with bfloat16 arithmetic and float32 weights for {{ cookiecutter.project_name }}."""

from __future__ import annotations

from torchhal.precision import MixedPrecision


class {{ cookiecutter.__class }}Precision(MixedPrecision):
    """Precision that uses torch's autocast to bfloat16.

    Override what the hardware wants differently: ``forward_context``, ``convert_module``, ``convert_input``,
    ``backward``, ``optimizer_step``; a loop never calls a method that nobody overrides.
    """

    # An accelerator without one of ``needs`` is refused before a run starts. The dtypes decide what they are; a
    # precision that needs more than a dtype adds a word of its own, which the accelerator has in ``capabilities``:
    # ``self.needs = self.needs | {"{{ cookiecutter.__alias }}_fp8"}``.

    def __init__(self) -> None:
        super().__init__("bfloat16")
        self.alias = "{{ cookiecutter.__alias }}_bf16"
