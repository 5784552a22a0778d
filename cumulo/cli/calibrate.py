"""`cumulo calibrate`: measures this machine and writes a device profile for the planner."""

from pathlib import Path
from typing import Annotated

import typer

from cumulo.errors import ConfigError

EXAMPLE = "Try: [bold]cumulo calibrate --out profile.yaml[/bold]"


def calibrate(
    out: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.yaml"),
    device: Annotated[
        str | None, typer.Option(help="Device, by its name in the catalogue. Default: detected.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Number format of the matrix products: bfloat16, float16 or float32.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds to repeat each operation.")] = 0.3,
    software: Annotated[
        str, typer.Option(help="Name of the profile, by which jobs refer to it.")
    ] = "measured-here",
) -> None:
    """Measure this machine and write a device profile for the planner.

    It measures matrix products, attention, memory-bound operations, loss, optimizer and launches. Constants that a
    single device cannot show, such as the cost of collectives, come from the built-in profile of its generation.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from cumulo.bench.device_timer import DeviceTimer, present_device
    from cumulo.plan.time.calibration import as_yaml, calibrated, constants
    from cumulo.plan.time.compute_profile import Profiles
    from cumulo.spec import catalog

    if not out.parent.is_dir():
        raise ConfigError(f"cannot write {out}: the folder {out.parent} does not exist")
    console = Console()
    cuda = torch.cuda.is_available()
    found = (
        catalog.device(device) if device else present_device(torch.cuda.get_device_name() if cuda else None)
    )
    dtype = dtype or ("bfloat16" if cuda else "float32")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"--dtype must be bfloat16, float16 or float32, got {dtype}")
    profiles = Profiles.load()
    base, borrowed = profiles.find(found, dtype)
    base_name = profiles.name_for(found, dtype)
    machine = DeviceTimer("cuda" if cuda else "cpu", getattr(torch, dtype), seconds)
    with console.status("measuring"):
        measured = list(machine.measure())
    note = (
        f"measured with torch {torch.__version__} on {torch.cuda.get_device_name() if cuda else 'this CPU'}"
    )
    profile = calibrated(base, found, dtype, measured, software, note)
    out.write_text(as_yaml(profile, base_name, profiles.named(base_name)), "utf-8")
    table = Table(title=f"{found.name}, {dtype}")
    for name in ("constant", "measured", "built-in"):
        table.add_column(name, justify="left" if name == "constant" else "right")
    for name in constants():
        if getattr(profile, name) != getattr(base, name):
            table.add_row(name, f"{getattr(profile, name):.3g}", f"{getattr(base, name):.3g}")
    console.print(table)
    for line in borrowed:
        console.print(f"not measured: {line}", highlight=False)
    console.print(f"profile written to {out}")
