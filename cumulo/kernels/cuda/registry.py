"""Which kernel and which tiles win on a device, measured: loaded by CudaDecoder, made by
`cumulo bench kernels --tune`.

A table per operation, keyed by dtype and shape class; all tables of one kind of device are one JSON file in
`winners/`, named after it. Shapes and devices that no table knows follow the defaults reasoned in the op files.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

WINNERS_FOLDER = Path(__file__).parent / "winners"
_PACKAGE = "cumulo.kernels.cuda"


# Which function of which module takes a table as JSON. Modules are imported when a table is there.
TABLES = {
    "paged_attention": "attention.config:use",
    "linear": "linear.linear:use_winners",
    "moe": "moe.moe:use",
    "flash_attention": "attention.flash_attention:use_winners",
}

_loaded: set[str] = set()


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"{_PACKAGE}.{module}"), name)
    return found


def device_name(device: torch.device | str) -> str:
    """The driver's name of the device; a CPU plays kernels with the interpreter and has no winners."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def winners_file(name: str, folder: Path = WINNERS_FOLDER) -> Path:
    """ "NVIDIA H200" -> winners/nvidia-h200.json"""
    plain = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return folder / f"{plain}.json"


def load_for(name: str, folder: Path = WINNERS_FOLDER) -> list[str]:
    """Take in the tables measured on this kind of device, once; the names of those there are.

    A table made for other kernels than these (a renamed option, say) is passed over: defaults are never wrong.
    """
    path = winners_file(name, folder)
    if str(path) in _loaded or not path.exists():
        return []
    _loaded.add(str(path))
    tables = json.loads(path.read_text())["tables"]
    used = []
    for name, user in TABLES.items():
        if name in tables:
            try:
                _function(user)(tables[name])
            except (TypeError, KeyError, ValueError, ImportError):
                continue
            used.append(name)
    return used


def gpu_memory() -> int:
    """Bytes of the present GPU that nobody has taken, this process's own cached ones included."""
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
