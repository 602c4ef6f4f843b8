"""Training runs: the loop, what a pruning method has to offer to it, counting, and the run folder."""
