"""What memory a GPU has left. Read by the engine and the trainer for their memory ledgers."""

import torch


def gpu_memory() -> int:
    """Bytes of the present GPU that nobody has taken, this process's own cached ones included."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
