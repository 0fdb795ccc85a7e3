"""The conformance checks: those without the hardware here, all of them wherever it is."""

from torchhal_conformance import conformance_suite

TestGPU = conformance_suite("accelerator", "gpu")
TestXPU = conformance_suite("accelerator", "xpu")
TestMPS = conformance_suite("accelerator", "mps")
TestTF32 = conformance_suite("precision", "tf32", accelerator="gpu")
