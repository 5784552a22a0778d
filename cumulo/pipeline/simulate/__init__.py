"""Plays a pipeline schedule in virtual time."""
