"""New guides of all callers: in which order they are compiled."""
