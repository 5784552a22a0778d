"""Faults that a text names: settings, states of hosts and of fabrics. They explain what bandwidths only show."""
