"""A training run in a folder: checkpoints, records, what a pruning method offers to it, and resuming."""
