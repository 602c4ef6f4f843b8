"""Layer by layer, a cut network is refitted to what the whole one computes, in closed form."""
