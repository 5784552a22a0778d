"""Answers that follow a grammar, a schema or a pattern."""
