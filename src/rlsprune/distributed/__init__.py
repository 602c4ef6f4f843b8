"""Several processes that train one network together: what the optimizer and the pruner ask of ``torch.distributed``."""
