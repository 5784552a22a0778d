"""The server: an OpenAI-compatible API in one process, the engine in another, and what operators need to see."""
