"""Helpers of the other modules."""
