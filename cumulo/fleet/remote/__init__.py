"""Servers behind a gateway: their connections, what they say of themselves, and the choice among them."""
