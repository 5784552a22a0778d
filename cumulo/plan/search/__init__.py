"""Finds layouts, ranks them and says why."""
