"""From documents to batches."""
