"""The engine's process and the messages to it."""
