"""The paper's experiments: their parts, runs, comparisons and sweeps."""
