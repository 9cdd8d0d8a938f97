"""A module that counts the GPUs while it is imported, as Megatron-Core's does by way of torch.compile."""

import torch

FOUND = torch.cuda.device_count()
