"""A model over several ranks."""
