"""`cumulo bench`: measurements next to the values they must reach, as a table and as JSON."""

from cumulo.cli.bench.verbs import app

__all__ = ["app"]
