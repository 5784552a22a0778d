"""What requests are like, as options: those that simulated traffic and load for a real server have in common."""

from typing import Annotated

import typer

REQUESTS = "Requests"
ARRIVALS = "poisson, constant or burst:SIZE."
_LENGTHS = "128, uniform:64-256, normal:MEAN,SD, lognormal:MEDIAN,SIGMA or file:LENGTHS.txt"

Input = Annotated[str, typer.Option("--input", help=f"Prompt tokens: {_LENGTHS}.", rich_help_panel=REQUESTS)]
Output = Annotated[str, typer.Option("--output", help="Answer tokens, likewise.", rich_help_panel=REQUESTS)]
SharedPrefix = Annotated[
    int, typer.Option(min=0, help="Tokens before the prompt that others share.", rich_help_panel=REQUESTS)
]
Prefixes = Annotated[
    int, typer.Option(min=1, help="How many different shared prefixes.", rich_help_panel=REQUESTS)
]
