"""Optimizers, and how ranks share their states."""
