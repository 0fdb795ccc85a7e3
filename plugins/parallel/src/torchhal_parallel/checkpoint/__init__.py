"""Save checkpoints that every rank writes its part of, and saves that a step does not wait for."""
