"""What the gateway decides: pure, from plain data."""
