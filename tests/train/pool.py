"""Ranks of tests: `cumulo.ranks.start.run_ranks`, forked from a process that has imported what they need."""

from functools import partial

from cumulo.ranks import start

# Ranks that hang are told of; on a busy machine others take minutes.
run_ranks = partial(start.run_ranks, preload=("cumulo.train.run.verify",), timeout_s=600)
