"""Latency by promise: what a request is promised, whether that can be kept, and how steps keep it. Pure."""
