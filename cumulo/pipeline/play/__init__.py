"""Runs a pipeline schedule on ranks."""
