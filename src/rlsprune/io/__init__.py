"""Files: pruned models, the state of a training, exports, and how they are written whole or not at all."""
