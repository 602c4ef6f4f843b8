"""Training of a network: one epoch, numerical faults, the average of the weights, and batches as users have them."""
