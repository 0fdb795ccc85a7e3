"""Accumulate, reduce and report the values that a run logs."""
