"""Training a network: one epoch, faults, the average of the weights, and batches as users have them."""
