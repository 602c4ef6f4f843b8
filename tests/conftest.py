"""Settings for all tests."""

import torch

# The tests' tensors are small: a second thread costs more than it gives, and makes runs depend on the machine.
torch.set_num_threads(1)
