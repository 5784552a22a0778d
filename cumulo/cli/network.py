"""`cumulo network lint`: mistakes in a fabric, a layout's traffic and NCCL's settings, before they cost a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from cumulo.base.quantities import parse_bytes
from cumulo.base.report import Row
from cumulo.base.strict import yaml_problem
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import option, takes_options
from cumulo.cli.shared.terminal import present, read_text, working
from cumulo.collectives.simulate.fabrics.links import Ints
from cumulo.diagnose.lint import Finding
from cumulo.diagnose.lint import fabric_rules as rules
from cumulo.diagnose.lint.fabric_rules import data_groups, worst
from cumulo.diagnose.lint.pfc import flows_of, lint_pfc, lint_victims
from cumulo.diagnose.lint.settings import lint_settings, settings_of
from cumulo.errors import ConfigError
from cumulo.spec.catalog import shipped
from cumulo.spec.cluster import Cluster

app = typer.Typer()
EXAMPLE = "Example: [bold]cumulo network lint llama3-roce --gpus 2048 --tp 8 --storage-links 64[/bold]"
_MORE = ("severity", "change", "gain", "low", "high")
_WHAT = "A fabric of the catalogue, a file with `flows:` for PFC, or a plan of `cumulo plan train --out`."


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    target: Annotated[str, typer.Argument(metavar="PLAN|FABRIC", help=_WHAT)]
    gpus: int = option("With a fabric: number of GPUs.", 1024)
    device: str = option("Device, by its name in the catalogue.", "h100-sxm")
    fabric: str = option("With a plan: the fabric it is for.", "rail-roce")
    tp: int = option(
        "With a fabric: GPUs of a tensor-parallel group; the rings of data parallelism are next to it.", 8
    )
    queue_pairs: int = option("Queue pairs of a connection.", 1, min=1)
    env: Path | None = option("A file with NCCL's settings, NAME=VALUE in each line.", None)
    storage_links: int = option("Links of the storage; 0: not checked.", 0)
    storage_gbps: float = option("Rate of one of them, in Gbit/s.", 200.0)
    checkpoint: str = option("Size of a checkpoint.", "5TB")
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


@app.command("lint", epilog=EXAMPLE)
@takes_options
def lint(chosen: LintOptions) -> None:
    """Find deadlocks, hash collisions, oversubscription, crossed rails, wrong NCCL settings and incast.

    Every finding says what to change and what that gains. The exit status is 1 if there is an error.
    """
    with working("checking"):
        found = list(_findings(chosen))
    rows = [
        Row(one.rule, one.value, note=one.what, more={name: getattr(one, name) for name in _MORE})
        for one in found
    ]
    present(rows, chosen.json_file, *(part for one in found for part in _shown(one)))
    if worst(found) == "error":
        raise typer.Exit(1)


def _shown(one: Finding) -> Iterator[RenderableType]:
    colour = {"error": "bold red", "warning": "yellow", "note": "dim"}[one.severity]
    yield Text.assemble((one.severity, colour), f" {one.rule}: {one.what}")
    for name, told in (("change", one.change), ("gain", one.gain)) if one.change else ():
        yield Padding(Text(f"{name}: {told}"), (0, 0, 0, 2), expand=False)


def _findings(chosen: LintOptions) -> Iterator[Finding]:
    content = _content(chosen.target)
    catalog = shipped(chosen.catalog_file)
    fabric = chosen.fabric if content is not None else chosen.target
    if content is not None and "flows" in content:
        flows, kind = flows_of(content)
        yield from lint_pfc(flows, kind)
        yield from lint_victims(flows, kind)
    else:
        cluster, groups = _job(chosen, content, fabric)
        yield from _of_fabric(chosen, cluster, groups)
    if chosen.env is not None:
        yield from lint_settings(settings_of(read_text(chosen.env)), catalog.fabric(fabric))


def _of_fabric(chosen: LintOptions, cluster: Cluster, groups: Ints) -> Iterator[Finding]:
    if flows := rules.lint_loops(cluster, groups):
        yield from lint_pfc(flows, kind="per-port")
    yield from rules.lint_collisions(cluster, groups, chosen.queue_pairs)
    yield from rules.lint_tiers(cluster, groups)
    yield from rules.lint_rails(cluster, groups, "data-parallel")
    if chosen.storage_links:
        size = parse_bytes(chosen.checkpoint, "--checkpoint")
        yield from rules.lint_incast(cluster, size, chosen.storage_links, chosen.storage_gbps, 30.0)


def _job(chosen: LintOptions, content: dict[str, Any] | None, fabric: str) -> tuple[Cluster, Ints]:
    """The cluster and its data-parallel rings."""
    catalog = shipped(chosen.catalog_file)
    if content is None:
        cluster = catalog.cluster(chosen.gpus, chosen.device, fabric=fabric)
        return cluster, data_groups(cluster.gpus, chosen.tp, max(2, min(64, cluster.gpus // chosen.tp)))
    layout = content.get("layout")
    if not isinstance(layout, dict):
        raise ConfigError(f"{chosen.target} has neither `flows:` nor `layout:`; see docs/network.md")
    sizes = {name: int(layout.get(name) or 1) for name in ("dp", "tp", "pp", "cp")}
    world, near = sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"], sizes["tp"]
    cluster = catalog.cluster(world, chosen.device, fabric=fabric)
    return cluster, data_groups(world, near, max(2, sizes["dp"] * sizes["cp"]))


def _content(target: str) -> dict[str, Any] | None:
    path = Path(target)
    if not path.is_file():
        if path.suffix in (".yaml", ".yml", ".json"):
            raise ConfigError(f"there is no file {target}")
        return None
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{target} is not valid YAML: {yaml_problem(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{target} must be a table, got {type(content).__name__}")
    return content
