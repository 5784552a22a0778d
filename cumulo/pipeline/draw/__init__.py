"""Pictures of a pipeline schedule."""
