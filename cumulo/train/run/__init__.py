"""The loop, its worker processes and what they keep."""
