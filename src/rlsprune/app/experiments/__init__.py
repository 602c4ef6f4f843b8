"""The paper's experiments: what they are made of, runs, comparisons and sweeps."""
