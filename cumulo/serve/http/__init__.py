"""The HTTP transport: connections, their limits and time-outs, and which hosts and origins are answered."""
