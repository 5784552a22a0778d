"""Experts: routing, grouped products, and products for a few tokens."""
