"""A user's model: how it is called, what it costs, the sizes of its layers, and its tensors."""
