"""A gateway in front of several servers: routes requests, retries them, and continues streams whose server died."""
