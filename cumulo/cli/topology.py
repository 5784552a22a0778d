"""`cumulo topology`: this machine's GPUs and network cards and what joins them, or those of a saved description."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cumulo.base.report import Row, table
from cumulo.cli.shared import options
from cumulo.cli.shared.terminal import present, read_text, save, unwrapped

if TYPE_CHECKING:
    from cumulo.collectives.topology.machine_graph import MachineGraph

EXAMPLE = "Example: [bold]cumulo topology examples/network/topo_h100.txt --out node.yaml[/bold]"


def topology(
    file: Path | None = typer.Argument(
        None,
        metavar="FILE",
        help="`nvidia-smi topo -m` as text, or NCCL's topology XML. Default: this machine.",
    ),
    out_file: Path | None = typer.Option(
        None,
        "--out",
        help="Write it as a node of the catalogue, for `cumulo plan --catalog FILE`.",
    ),
    name: str = typer.Option("this-machine", help="Name of that node."),
    device: str | None = typer.Option(
        None, help="Device, by its name in the catalogue. Default: guessed from the links."
    ),
    json_file: options.JsonOption = None,
) -> None:
    """Show how GPUs and network cards are joined."""
    import yaml

    from cumulo.collectives.topology.machine_graph import links

    machine = _read(file)
    rows = [
        Row("GPUs", len(machine.gpus), more={"gpus": [place.name for place in machine.gpus]}),
        Row("network cards", len(machine.cards), more={"cards": [place.name for place in machine.cards]}),
        Row("NUMA nodes", machine.numa_nodes),
        Row("GPUs joined by NVLink", machine.domain if machine.domain > 1 else 0),
    ]
    if most := max((links(kind) for kind in machine.near.values()), default=0):
        note = f"{most} links, {'through switches' if machine.switched else 'from GPU to GPU'}"
        rows.append(Row("NVLink of a pair, each way", most * machine.nvlink_gbps, "GB/s", note=note))
    title = "this machine" if file is None else str(file)
    lines = [*_cards(machine), *machine.complaints()]
    present(rows, json_file, table(title, rows), unwrapped("\n".join(lines)), complaints=machine.complaints())
    save(out_file, lambda: yaml.safe_dump(machine.entry(name, device), sort_keys=False), "node")


def _cards(machine: "MachineGraph") -> Iterator[str]:
    """The network card next to each GPU."""
    for gpu, place in enumerate(machine.gpus):
        card = machine.nearest_card(gpu)
        if card is not None:
            kind = machine.card_near.get((gpu, card), "SYS")
            yield f"{place.name}: card {machine.cards[card].name} ({kind})"


def _read(file: Path | None) -> "MachineGraph":
    from cumulo.collectives.topology.readers import parse_nccl_xml, parse_topo, read_machine

    if file is None:
        return read_machine()
    text = read_text(file)
    return parse_nccl_xml(text) if text.lstrip().startswith("<") else parse_topo(text)
