"""Killable workers: programs of strangers (guides, chat templates) run in processes with limits."""
