"""Requests, block pool and scheduler (pure) and the runners that play their plans."""
