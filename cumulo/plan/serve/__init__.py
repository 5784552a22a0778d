"""Plans a deployment that serves a model."""
