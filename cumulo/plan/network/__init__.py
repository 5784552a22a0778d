"""Time of a collective on a fabric."""
