"""Players of collective schedules: real processes over shared memory and torch.distributed."""
