"""The decoder (dense, mixture of experts, latent attention), its weights and its tokenizer."""
