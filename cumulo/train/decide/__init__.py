"""What a training job will do: configuration, checks, ledger. Pure."""
