"""A user's own network on the user's own data: `rlsprune fit`."""
