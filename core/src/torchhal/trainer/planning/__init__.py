"""Choose the strategy of strategy=\"auto\" by the memory that a training step needs."""
