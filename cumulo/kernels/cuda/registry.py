"""Which kernel and which tiles win on a device, measured: loaded by CudaDecoder, made by `tune_all` on the device.

A table per operation, keyed by dtype and shape class; all tables of one kind of device are one JSON file in
`winners/`, named after it. Shapes and devices that no table knows follow the defaults reasoned in the op files.
`python -m cumulo.kernels.cuda.registry` measures the present device and writes its file.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

WINNERS_FOLDER = Path(__file__).parent / "winners"
_PACKAGE = "cumulo.kernels.cuda"


@dataclass(frozen=True, slots=True)
class Table:
    """One operation's table: who measures it and who uses it. Modules are imported when asked for."""

    name: str
    tuner: str  # "module:function" without arguments; returns the table as JSON, or leaves it in `reader`
    user: str  # "module:function" that takes the table as JSON
    reader: str = ""  # "module:function" that returns the table as JSON, where the tuner does not

    def tune(self) -> Any:
        found = _function(self.tuner)()
        return _function(self.reader)() if self.reader else found

    def use(self, rows: Any) -> None:
        _function(self.user)(rows)


TABLES = (
    Table("paged_attention", "attention.bench:tune", "attention.config:use"),
    Table("linear", "linear.tune:tune", "linear.linear:use_winners", "linear.linear:winners"),
    Table("moe", "moe.bench:tune", "moe.moe:use"),
    Table(
        "flash_attention", "attention.flash_attention_bench:tune", "attention.flash_attention:use_winners",
        "attention.flash_attention:winners",
    ),
)  # fmt: skip

_loaded: set[str] = set()


def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"{_PACKAGE}.{module}"), name)
    return found


def device_name(device: torch.device | str) -> str:
    """As the driver names it; a CPU plays kernels with the interpreter and has no winners."""
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
    for table in TABLES:
        if table.name in tables:
            try:
                table.use(tables[table.name])
            except (TypeError, KeyError, ValueError, ImportError):
                continue
            used.append(table.name)
    return used


def tune_all(path: str | Path | None = None, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure every table (or those named) on the present GPU; written after each, so that none is lost.

    Tables already in the file stay unless they are measured anew. A table that fails is reported and left out.
    """
    name = device_name("cuda")
    path = winners_file(name) if path is None else Path(path)
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"tables": {}}
    report |= {"device": name, "torch": torch.__version__, "triton": import_module("triton").__version__}
    for table in TABLES:
        if only and table.name not in only:
            continue
        print(f"== {table.name}", flush=True)
        started_s = time.perf_counter()
        try:
            report["tables"][table.name] = table.tune()
        except Exception as error:  # one operation's trouble must not cost the others their measurements
            print(f"== {table.name} failed: {type(error).__name__}: {error}", flush=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
        print(f"== {table.name}: {time.perf_counter() - started_s:.0f} s, written to {path}", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="measure which kernels win on this GPU and keep the table")
    parser.add_argument("path", nargs="?", help="where the table goes; unless given, into the package")
    parser.add_argument("--only", default="", help=", ".join(table.name for table in TABLES))
    given = parser.parse_args()
    tune_all(given.path, [name for name in given.only.split(",") if name])


if __name__ == "__main__":
    main()
