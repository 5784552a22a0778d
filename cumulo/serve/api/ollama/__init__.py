"""Ollama's API, under /api/: its clients work against this server."""
