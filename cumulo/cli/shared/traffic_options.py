"""Options that describe requests. Simulated traffic and load tests of a real server share them."""

from typing import Annotated

import typer

REQUESTS = "Requests"
ARRIVALS = "Arrival process: poisson, constant or burst:SIZE."
_LENGTHS = "128, uniform:64-256, normal:MEAN,SD, lognormal:MEDIAN,SIGMA or file:LENGTHS.txt"

Input = Annotated[
    str, typer.Option("--input", help=f"Prompt length in tokens: {_LENGTHS}.", rich_help_panel=REQUESTS)
]
Output = Annotated[
    str,
    typer.Option(
        "--output", help="Answer length in tokens, in the same forms as --input.", rich_help_panel=REQUESTS
    ),
]
SharedPrefix = Annotated[
    int,
    typer.Option(min=0, help="Length of a prefix that requests share, in tokens.", rich_help_panel=REQUESTS),
]
Prefixes = Annotated[
    int, typer.Option(min=1, help="Number of different shared prefixes.", rich_help_panel=REQUESTS)
]
