"""Tables that compare methods at equal size and equal cost: which runs they take, their records, and how they read."""
