"""One machine's GPUs, network cards and what joins them: read, drawn, and searched for rings as NCCL would."""
