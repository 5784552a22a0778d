"""Heads that draft: small layers on the hidden states of a decoder, which propose its next tokens."""
