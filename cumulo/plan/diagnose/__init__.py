"""What a pasted output of nccl-tests, NCCL, perftest or a flight recorder says about a network."""
