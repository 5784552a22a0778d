"""Places for ranks on this machine: its GPUs and its CPU cores. Asked where engines are started or planned."""

import os
from pathlib import Path

# So many ranks can be started on any CPU, to try a layout, even where they share cores.
LEAST_CPU_RANKS = 4


def gpus_here() -> list[str]:
    """Those that this process may use, as CUDA names them. Asks no driver, so that none is loaded."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [one.strip() for one in allowed.split(",") if one.strip()]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((number for number in found if number.isdecimal()), key=int)
