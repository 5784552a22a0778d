"""Writes, reads and verifies checkpoints."""
