"""Elastic jobs: how many GPUs each gets, by marginal goodput."""
