"""The inverse autocorrelation of a layer's inputs, gathered by watching it, for networks that any optimizer trains."""
