"""Run the fit, evaluation and prediction loops over batches."""
