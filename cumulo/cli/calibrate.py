"""`cumulo calibrate`: measures this machine and writes a device profile for the planner."""

from pathlib import Path

import typer

from cumulo.base.report import grid
from cumulo.cli.shared import terminal
from cumulo.errors import ConfigError

EXAMPLE = "Try: [bold]cumulo calibrate --out profile.yaml[/bold]"


def calibrate(
    out: Path = typer.Option(Path("profile.yaml"), help="File to write the profile to."),
    device: str | None = typer.Option(None, help="Device, by its name in the catalogue. Default: detected."),
    dtype: str = typer.Option("", help="Number format of the matrix products: bfloat16, float16 or float32."),
    seconds: float = typer.Option(0.3, min=0.01, help="Seconds to repeat each operation."),
    software: str = typer.Option("measured-here", help="Name of the profile, by which jobs refer to it."),
) -> None:
    """Measure this machine and write a device profile for the planner.

    It measures matrix products, attention, memory-bound operations, loss, optimizer and launches. Constants that a
    single device cannot show, such as the cost of collectives, come from the built-in profile of its generation.
    """
    import torch

    from cumulo.bench.device_timer import DeviceTimer, present_device
    from cumulo.plan.time.calibration import as_yaml, calibrated, constants
    from cumulo.plan.time.compute_profile import Profiles
    from cumulo.spec import catalog

    if not out.parent.is_dir():
        raise ConfigError(f"cannot write {out}: the folder {out.parent} does not exist")
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
    with terminal.err.status("measuring"):
        measured = list(machine.measure())
    note = (
        f"measured with torch {torch.__version__} on {torch.cuda.get_device_name() if cuda else 'this CPU'}"
    )
    profile = calibrated(base, found, dtype, measured, software, note)
    out.write_text(as_yaml(profile, base_name, profiles.named(base_name)), "utf-8")
    changed = [name for name in constants() if getattr(profile, name) != getattr(base, name)]
    rows = [(name, f"{getattr(profile, name):.3g}", f"{getattr(base, name):.3g}") for name in changed]
    terminal.out.print(grid(("constant", "measured", "built-in"), rows, f"{found.name}, {dtype}"))
    for line in borrowed:
        terminal.out.print(f"not measured: {line}")
    terminal.out.print(f"profile written to {out}")
