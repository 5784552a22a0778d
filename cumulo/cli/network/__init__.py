"""The verbs about networks: simulate network, network lint, topology, diagnose."""
