"""The decoder as it is trained."""
