"""Request and answer bodies: how large they may be, where they are read, and what a client is told about them."""
