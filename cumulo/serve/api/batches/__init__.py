"""Work that may wait: /v1/files holds requests as lines of JSON, /v1/batches runs them."""
