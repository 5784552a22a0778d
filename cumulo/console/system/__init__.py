"""Parts of the system page."""
