"""Algorithms as plain schedules, the proof that they are right, what they cost, and which one to take."""
