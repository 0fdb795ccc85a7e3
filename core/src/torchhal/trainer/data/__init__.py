"""Load, share out and resume the data of a run."""
