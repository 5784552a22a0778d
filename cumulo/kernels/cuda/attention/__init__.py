"""Attention over a paged KV cache, over a latent cache, and for training."""
