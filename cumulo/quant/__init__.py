"""Quantising models: what to store in how many bits (decide), the methods, and the run over layers (play)."""
