"""Save checkpoints that every rank writes its part of, and saves that do not block a step."""
