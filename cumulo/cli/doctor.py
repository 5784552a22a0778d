"""`cumulo doctor`: checks the machine, the packages and a model, and measures the memory it uses."""

from dataclasses import dataclass

import typer

from cumulo.cli.shared import options
from cumulo.cli.shared.declare import option, takes_options

EXAMPLE = "Example: [bold]cumulo doctor --json report.json[/bold]"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    model: options.ModelArgument = None
    quick: bool = option("Skip the checks that load the model.", False, "--quick")
    json_file: options.JsonOption = None
    engine: options.EngineOptions = options.EngineOptions()


@takes_options
def doctor(chosen: DoctorOptions) -> None:
    """Check the machine, the packages and the model, and show predicted next to measured memory."""
    from cumulo.cli.view import checkup

    if not checkup.examine(chosen.model, chosen.engine.config(), chosen.quick, chosen.json_file):
        raise typer.Exit(1)
