"""`cumulo plan catalog`: the models, devices, nodes and fabrics that planner and simulators know by name."""

from collections.abc import Callable
from typing import Annotated

import typer

from cumulo.base.quantities import number, quantity
from cumulo.base.report import Row, grid
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.options import JsonOption
from cumulo.cli.shared.terminal import dim, present
from cumulo.errors import ConfigError
from cumulo.spec.catalog import Catalog, shipped
from cumulo.spec.counting import flops_per_token, parameter_count

EXAMPLE = "Example: [bold]cumulo plan catalog models[/bold]"
KindArgument = Annotated[
    str | None,
    typer.Argument(metavar="models|devices|nodes|fabrics", help="What to list. Default: everything."),
]
Entry = dict[str, tuple[float, str] | str]  # by column: a figure with its unit, or words


def catalog(kind: KindArgument = None, file: shared.CatalogFile = None, json_file: JsonOption = None) -> None:
    """List the models, devices, nodes and network fabrics that plans can name.

    A model has the bytes that each token takes in a bfloat16 KV cache and the FLOPs of a forward step at a context
    of 4,096 tokens. The peak of a device is that of dense bfloat16 products.
    """
    if kind is not None and kind not in _KINDS:
        raise ConfigError(f"the catalogue lists {', '.join(_KINDS)}; got {kind!r}")
    known = shipped(file)
    found = {
        one: {name: _KINDS[one](known, name) for name in known.names(one)}
        for one in ([kind] if kind else _KINDS)
    }
    rows = [
        Row(f"{one[:-1]} {name}", None, more=_plain(entry))
        for one, entries in found.items()
        for name, entry in entries.items()
    ]
    tables = [
        grid(
            (one, *next(iter(entries.values()))),
            [(name, *map(_told, entry.values())) for name, entry in entries.items()],
        )
        for one, entries in found.items()
    ]
    present(rows, json_file, *tables, dim("--catalog FILE.yaml adds your own."))


def _told(cell: tuple[float, str] | str) -> str:
    return cell if isinstance(cell, str) else quantity(*cell)


def _plain(entry: Entry) -> dict[str, float | str]:
    return {name: cell if isinstance(cell, str) else cell[0] for name, cell in entry.items()}


def _model(known: Catalog, name: str) -> Entry:
    spec = known.model(name)
    return {
        "parameters": f"{number(parameter_count(spec) / 1e9)} billion",
        "KV per token": (spec.kv_bytes_per_token(2), "B"),
        "forward step": (flops_per_token(spec, 4096), "FLOP"),
        "context": f"{spec.max_context:,}",
        "experts": "" if spec.moe is None else f"{spec.moe.experts_per_token}/{spec.moe.experts}",
    }


def _device(known: Catalog, name: str) -> Entry:
    one = known.device(name)
    return {
        "memory": (one.memory_bytes, "B"),
        "bandwidth": (one.memory_bytes_per_s / 1e9, "GB/s"),
        "peak": (one.flops("bfloat16"), "FLOP/s"),
        "links": f"{number(one.link_bytes_per_s / 1e9)} GB/s {one.link_kind}",
        "USD/h": number(one.price_per_hour),
    }


def _node(known: Catalog, name: str) -> Entry:
    one = known.node(name)
    return {
        "devices": f"{one.gpus} × {one.device.name}",
        "network per device": (one.nic_bytes_per_s / 1e9, "GB/s"),
        "joined by links": f"{one.scale_up_gpus}",
    }


def _fabric(known: Catalog, name: str) -> Entry:
    one = known.fabric(name)
    return {"kind": one.kind, "transport": one.transport, "ports of a switch": f"{one.switch_ports}"}


_KINDS: dict[str, Callable[[Catalog, str], Entry]] = {
    "models": _model, "devices": _device, "nodes": _node, "fabrics": _fabric,
}  # fmt: skip
