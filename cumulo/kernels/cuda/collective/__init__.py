"""Ranks that read each other's device memory: sums and gathers in one kernel each."""
