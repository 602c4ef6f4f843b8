"""A training run in a folder: checkpoints, records, the interface of pruning methods, and resuming."""
