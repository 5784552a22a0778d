"""One file per operation: torch reference, fast kernel, and the registry that picks the measured winner."""
