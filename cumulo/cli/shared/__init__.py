"""Options and terminal output that several verbs use."""
