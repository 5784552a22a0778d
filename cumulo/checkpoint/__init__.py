"""Checkpoints: whole or absent, verified when read, written while training goes on. The trainer uses it."""
