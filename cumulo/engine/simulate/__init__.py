"""Plays the scheduler's plans in virtual time."""
