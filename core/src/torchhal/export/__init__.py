"""Write a trained model for use without torchhal: as safetensors, by ``torch.export``, or as ONNX."""

from torchhal.export._export import export
from torchhal.export._result import Export

__all__ = ["Export", "export"]
