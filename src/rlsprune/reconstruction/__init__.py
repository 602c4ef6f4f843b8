"""The refit of a cut network to the outputs of the whole one, layer by layer, in closed form."""
