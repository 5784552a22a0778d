"""Players of collective schedules: real processes over sockets, shared memory and torch.distributed."""
