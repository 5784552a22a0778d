"""Which rank writes and keeps what. Pure."""
