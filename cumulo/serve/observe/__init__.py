"""What an operator sees of a running server, and what keeps that from disturbing it."""
