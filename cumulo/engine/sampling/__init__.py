"""How logits become tokens."""
