"""Bagua's algorithms, by their names."""

from __future__ import annotations

from bagua.torch_api.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam
from bagua.torch_api.algorithms.base import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry"]

for _name, _cls in {
    "gradient_allreduce": gradient_allreduce.GradientAllReduceAlgorithm,
    "bytegrad": bytegrad.ByteGradAlgorithm,
    "decentralized": decentralized.DecentralizedAlgorithm,
    "low_precision_decentralized": decentralized.LowPrecisionDecentralizedAlgorithm,
    "qadam": q_adam.QAdamAlgorithm,
    "async": async_model_average.AsyncModelAverageAlgorithm,
}.items():
    GlobalAlgorithmRegistry.register(_name, _cls)
