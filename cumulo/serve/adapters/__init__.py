"""Low-rank adapters of a server: which there are, who uses them, and the endpoints that load and drop them."""
