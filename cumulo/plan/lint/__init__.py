"""Mistakes in a network's design and settings, found before they cost a run. `cumulo network lint` calls it."""
