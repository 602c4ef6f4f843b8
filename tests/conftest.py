"""Settings for all tests."""

import torch
from hypothesis import settings

# The tests' tensors are small: a second thread costs more than it gives, and makes runs depend on the machine.
torch.set_num_threads(1)

# How long an example takes depends on what else the machine does.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
