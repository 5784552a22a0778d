"""Policies: who is next, who gives way, and on which nodes a gang is placed. `policies.py` has them by name."""
