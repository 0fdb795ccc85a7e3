"""Fused operators for training."""
