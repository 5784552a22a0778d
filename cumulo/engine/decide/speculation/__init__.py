"""Speculation: which tokens a step verifies beside the one it draws, and how many. Pure; asked by the scheduler."""
