"""Conversations and completions in the terminal."""
