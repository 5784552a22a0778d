"""Options that a job file or a manifest passes on to `cumulo serve`, checked by its own parser."""

from collections.abc import Sequence
from typing import Any

import typer


def refused_by_serve(words: Sequence[str]) -> str | None:
    """What `cumulo serve` would say of these words; None: it takes them."""
    from cumulo.cli.serve import serve

    alone = typer.Typer()
    alone.command()(serve)
    command: Any = typer.main.get_command(alone)
    try:
        command.make_context("serve", [*words])
    except Exception as error:  # typer's own copy of click has no public name
        if not hasattr(error, "format_message"):
            raise
        return str(error.format_message())
    return None
