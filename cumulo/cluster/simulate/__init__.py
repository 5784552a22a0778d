"""Plays the decisions of policies and autoscaling rules in virtual time."""
