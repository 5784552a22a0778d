"""Matrix products: few rows, 4 and 8 bits, batch-invariant."""
