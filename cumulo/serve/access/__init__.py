"""Keys, limits, and who may do what."""
