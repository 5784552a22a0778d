"""Reports as tables in the terminal."""
