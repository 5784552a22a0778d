"""Processes and groups: the door to torch.distributed."""
