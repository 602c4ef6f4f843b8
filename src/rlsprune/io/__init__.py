"""Files: pruned models, the state of a training, exports, and writing them whole or not at all."""
