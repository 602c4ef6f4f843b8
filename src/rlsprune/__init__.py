"""Train a PyTorch network and make it smaller in the same run, by recursive least squares."""
