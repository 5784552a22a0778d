"""`cumulo doctor`: checks the machine, the packages and a model, and measures the memory it uses."""

from typing import Annotated

import typer

from cumulo.cli.shared import options

EXAMPLE = "Example: [bold]cumulo doctor --json report.json[/bold]"


def doctor(
    model: options.ModelArgument = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the checks that load the model.")] = False,
    json_file: options.JsonOption = None,
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    kv_memory_gib: options.KvMemory = None,
    device: options.Device = None,
    weights: options.Weights = None,
    kv_dtype: options.KvDtype = None,
) -> None:
    """Check the machine, the packages and the model, and show predicted next to measured memory."""
    from cumulo.cli.view import checkup

    config = options.engine_config(
        threads=threads,
        max_context=max_context,
        kv_memory_gib=kv_memory_gib,
        device=device,
        weights=weights,
        kv_dtype=kv_dtype,
    )
    if not checkup.examine(model, config, quick, json_file):
        raise typer.Exit(1)
