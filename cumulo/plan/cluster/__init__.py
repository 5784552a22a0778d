"""Plans a cluster: fabric, failures, checkpoints, bill."""
