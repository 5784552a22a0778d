"""Cross-entropy of a training step."""
