"""Ranks of tests: `cumulo.ranks.start.run_ranks`, forked from a process that has imported what they need."""

from functools import partial

from cumulo.ranks import start

run_ranks = partial(start.run_ranks, preload=("cumulo.train.run.verify",))
