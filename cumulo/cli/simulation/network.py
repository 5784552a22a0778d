"""`cumulo simulate network`: collectives and other traffic over a fabric, link by link, in virtual time."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cumulo.base import report as reports
from cumulo.base.figures import RunFigure, figure_rows
from cumulo.base.files import write_text_file
from cumulo.base.page import html_table, page
from cumulo.base.quantities import parse_bytes, parse_duration_s, parse_number, quantity
from cumulo.base.report import Row
from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import Panel, takes_options
from cumulo.cli.shared.terminal import dim, note, only_json, present, working
from cumulo.collectives.simulate.collective_traffic import collective_traffic
from cumulo.collectives.simulate.fabrics.build import JoinedSites, fabric_graph
from cumulo.collectives.simulate.fabrics.links import FabricGraph, Routing
from cumulo.collectives.simulate.link_use import heat_map
from cumulo.collectives.simulate.place import parse_job, placed, pods_of
from cumulo.collectives.simulate.player import LinkChange, NetworkTraffic, play_network
from cumulo.errors import ConfigError
from cumulo.plan.search.fixed import fixed_job
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.time.step import estimate
from cumulo.plan.time.step_traffic import AxisTime, play_step, step_calls
from cumulo.spec.catalog import shipped
from cumulo.spec.cluster import Cluster

_FABRIC, _TRAFFIC, _REPORT = map(Panel, ("Fabric", "Traffic", "Report"))


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    cluster: shared.ClusterOptions
    oversubscription: str = _FABRIC(
        "Oversubscription of each tier above the leaves, such as 1,7. Default: the fabric's own.", ""
    )
    pod_gpus: int = _FABRIC("GPUs below one spine layer; 0: as many as its ports allow.", 0)
    sites: int = _FABRIC("Number of datacentres, of --gpus each.", 1, min=1)
    site_gbps: float = _FABRIC("With --sites: bandwidth between two sites, in Gbit/s, each way.", 1600.0)
    site_delay: str = _FABRIC("With --sites: delay between two sites, one way.", "5ms")
    routing: str = _FABRIC(
        "ecmp: by hash; static: by destination; adaptive: packets spread over all paths.", "ecmp"
    )
    queue_pairs: int = _FABRIC("Queue pairs of a message, each hashed by itself (ecmp).", 1, min=1)
    seed: int = _FABRIC("Seed of the hash. Another seed is another cabling.", 0)
    collective: str = _TRAFFIC(
        "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send (to the next rank) or incast (all to "
        "one).",
        "all_reduce",
    )
    algorithm: str = _TRAFFIC(
        "multi-ring (a ring for each rail), or an algorithm of `cumulo collective`.", "multi-ring"
    )
    size: str = _TRAFFIC("Bytes of the collective, as nccl-tests counts them.", "1GiB")
    placement: str = _TRAFFIC(
        "packed: rank i on GPU i; scattered: nodes in random order; interleaved: consecutive nodes in "
        "different pods.",
        "packed",
    )
    job: list[str] = _TRAFFIC(
        "One of several jobs, as NAME:key=value,...: gpus=0-511, collective, algorithm, size, start (such as 1ms), "
        "background=yes. Repeat it for each job.",
        (),
        metavar="JOB",
    )
    fail: list[str] = _TRAFFIC(
        "A link that changes, as LINK@TIME=GBPS, such as 'leaf 0 → spine 3@1ms=0'. Repeat it.",
        (),
        metavar="CHANGE",
    )
    step_latency: str = _TRAFFIC(
        "Latency that software adds to every message, such as 14us for NCCL's Simple protocol.", "0us"
    )
    window: str = _TRAFFIC("Bytes that a queue pair may have under way, such as 16MiB; 0: no limit.", "0")
    train: str = _TRAFFIC(
        "Play a whole training step's communication of this model instead; see --layout.", ""
    )
    layout: str = _TRAFFIC("With --train: for example dp=128,tp=8,pp=16,zero=1.", "dp=1,tp=8,pp=1")
    batch: shared.BatchOptions = shared.BatchOptions()
    order: str = _TRAFFIC("With --train: outermost axis of the mesh, pp or dp.", "pp")
    heat_map: Path | None = _REPORT("Write a heat map of links over time (.svg or .html).", None)
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


EXAMPLE = (
    "Example: [bold]cumulo simulate network --gpus 1024 --fabric fat-tree-roce --size 1GiB --routing ecmp "
    "--queue-pairs 4 --heat-map links.svg[/bold]"
)


@takes_options
def network(chosen: NetworkOptions) -> None:
    """Simulate collectives on a fabric, link by link: routing, sharing, failures, several jobs at once."""
    began_s = time.process_time()
    if chosen.train:
        _play_step(chosen)
    else:
        _play_jobs(chosen, began_s)
        return
    note(f"simulated in {time.process_time() - began_s:.2f} s of CPU time")


def _cluster(chosen: NetworkOptions) -> Cluster:
    cluster = chosen.cluster.cluster(shipped(chosen.catalog_file))
    if chosen.oversubscription:
        ratios = tuple(float(part) for part in chosen.oversubscription.split(","))
        cluster = replace(cluster, fabric=replace(cluster.fabric, oversubscription=ratios))
    return cluster


def _graph(chosen: NetworkOptions) -> FabricGraph:
    cluster = _cluster(chosen)
    sites = [fabric_graph(cluster, pod_gpus=chosen.pod_gpus or None) for _ in range(chosen.sites)]
    if chosen.sites == 1:
        return sites[0]
    return JoinedSites(sites, chosen.site_gbps * 1e9 / 8, parse_duration_s(chosen.site_delay, "--site-delay"))


def _routing(chosen: NetworkOptions) -> Routing:
    return Routing(chosen.routing, chosen.queue_pairs, chosen.seed)  # type: ignore[arg-type]


def _play_jobs(chosen: NetworkOptions, began_s: float) -> None:
    with working("simulating"):
        graph = _graph(chosen)
        jobs = _jobs(chosen, graph)
        run = play_network(
            graph,
            jobs,
            _routing(chosen),
            [_change(text, graph) for text in chosen.fail],
            parse_duration_s(chosen.step_latency, "--step-latency"),
            parse_bytes(chosen.window) or None,
            record=True,
        )
    rows = [
        Row(f"{job.name}: time", run.ends_s[job.name] - job.start_s, "s", "lower", more={"job": job.name})
        for job in jobs
        if job.name in run.ends_s
    ]
    for tier, (mean, most) in run.use.by_tier().items() if run.use else ():
        note_of_tier = f"busiest link {most:.0%}"
        rows.append(
            Row(f"{tier}: mean use of used links", 100 * mean, "%", note=note_of_tier, more={"most": most})
        )
    title, cpu_s = f"{graph.ranks:,} GPUs, {chosen.routing} routing", time.process_time() - began_s
    shown: list[Any] = [reports.table(title, rows)]
    if run.rerouted:
        shown.append(f"Messages that took another path because a link failed: {run.rerouted:,}.")
    present(rows, chosen.json_file, *shown, cpu_s=cpu_s, messages=run.messages, solves=run.solves)
    if not only_json(chosen.json_file):
        note(
            f"{run.messages:,} messages on {len(graph.links.capacity):,} links, in {cpu_s:.2f} s of CPU time; "
            f"rates were worked out {run.solves:,} time{'' if run.solves == 1 else 's'}"
        )
    if chosen.heat_map is not None and run.use is not None:
        picture = heat_map(run.use, title)
        if chosen.heat_map.suffix == ".html":
            ends = [(name, quantity(end_s, "s")) for name, end_s in run.ends_s.items()]
            picture = page(title, html_table(("job", "ends after"), ends), picture)
        write_text_file(chosen.heat_map, picture)


def _jobs(chosen: NetworkOptions, graph: FabricGraph) -> list[NetworkTraffic]:
    per_node = getattr(graph, "node_gpus", 0) or _cluster(chosen).node.gpus
    texts = chosen.job or [f"{chosen.collective}:gpus=0-{graph.ranks - 1}"]
    found: list[NetworkTraffic] = []
    for text in texts:
        job = parse_job(text, chosen.collective, chosen.algorithm, chosen.size)
        gpus = placed(job.first, job.last, chosen.placement, per_node, graph, chosen.seed)
        found.append(
            collective_traffic(
                job.name,
                job.collective,
                job.algorithm,
                gpus,
                job.size_bytes,
                per_node,
                job.start_s,
                job.background,
            )
        )
    return found


def _change(text: str, graph: FabricGraph) -> LinkChange:
    name, at, rest = text.rpartition("@")
    when, equals, rate = rest.partition("=")
    if not at or not equals:
        raise ConfigError(f"--fail must look like 'leaf 0 → spine 3@1ms=0', got {text!r}")
    gbps = parse_number(rate, "the rate of --fail in Gbit/s")
    link = graph.links.named(name.strip().replace("->", "→"))
    return LinkChange(parse_duration_s(when, "the time of --fail"), link, gbps * 1e9 / 8)


def _play_step(chosen: NetworkOptions) -> None:
    if chosen.order not in ("pp", "dp"):
        raise ConfigError(f"--order must be pp or dp, got {chosen.order!r}")
    catalog, cluster = shipped(chosen.catalog_file), _cluster(chosen)
    goal = TrainGoal(catalog.model_or_file(chosen.train), cluster, chosen.batch.batch, chosen.batch.sequence)
    job = fixed_job(chosen.layout, goal)
    flat = replace(cluster, fabric=replace(cluster.fabric, oversubscription=(1.0,)))
    overhead_s = parse_duration_s(chosen.step_latency, "--step-latency")
    with working("simulating"):
        found = []
        for one, how in ((cluster, _routing(chosen)), (flat, Routing("adaptive"))):
            graph = fabric_graph(one, pod_gpus=chosen.pod_gpus or None)
            calls = step_calls(job, one.node.gpus, chosen.order)  # type: ignore[arg-type]
            gpus = placed(0, one.gpus - 1, chosen.placement, one.node.gpus, graph, chosen.seed)
            found.append(list(play_step(calls, graph, how, gpus, overhead_s)))
        step_s = estimate(job, flat, explain=False).step_s
    pairs = [(f"{mine.axis} {mine.collective}", (mine, ideal)) for mine, ideal in zip(*found, strict=True)]
    rows = []
    for name, pair in pairs:
        more = {told: getattr(pair[0], told) for told in ("calls", "size_bytes", "ranks", "far_share")}
        rows += [replace(row, more=more) for row in figure_rows(name, pair, _AXES)]
    total, least = (sum(axis.total_s for axis in side) for side in found)
    rows.append(Row("all communication", total, "s", "lower"))
    rows.append(Row("all communication, 1 : 1 and adaptive", least, "s", "lower"))
    rows.append(Row("step on a 1 : 1 fabric, cost model", step_s, "s", "lower"))
    pods = pods_of(fabric_graph(cluster, pod_gpus=chosen.pod_gpus or None))
    title = f"{chosen.train}, {chosen.layout}, on {cluster.gpus:,} GPUs in {pods} pods, {chosen.placement}"
    key = (
        "slower: times what it takes on a 1 : 1 fabric with adaptive routing. far: messages that pass the top "
        "tier."
    )
    reasons = (_why(name, *pair, max(cluster.fabric.oversubscription), step_s) for name, pair in pairs)
    present(
        rows, chosen.json_file, _table(title, pairs),
        f"A step takes {quantity(step_s, 's')} on a 1 : 1 fabric by the cost model.", dim(key),
        *filter(None, reasons),
    )  # fmt: skip


def _table(title: str, pairs: list[tuple[str, tuple[AxisTime, AxisTime]]]) -> reports.ReportTable:
    """Also for a narrow terminal."""
    shown = [one for one in _AXES if one.heading]
    lines = [((name, *(one.cell(pair) for one in shown)), "") for name, pair in pairs]
    headings = ["collective", *(one.heading for one in shown)]
    return reports.ReportTable(
        title, headings, [0 < place < len(shown) for place in range(len(headings))], lines
    )


# Of each axis: what it takes on the fabric, and on one with a 1 : 1 ratio and adaptive routing.
_AXES = (
    RunFigure("", lambda pair: pair[0].ranks, heading="ranks"),
    RunFigure("", lambda pair: pair[0].size_bytes, "B", heading="size"),
    RunFigure("", lambda pair: pair[0].calls, heading="calls"),
    RunFigure("", lambda pair: pair[0].call_s, "s", heading="a call"),
    RunFigure("in a step", lambda pair: pair[0].total_s, "s", "lower", "in a step"),
    RunFigure(
        "times its 1 : 1 time",
        lambda pair: pair[0].call_s / pair[1].call_s,
        "",
        "lower",
        "slower",
        "{:.2f} ×",
    ),
    RunFigure("", lambda pair: pair[0].far_share, heading="far", shown="{:.0%}"),
    RunFigure("", lambda pair: pair[0].busiest, heading="busiest", shown="{}"),
)


def _why(name: str, axis: AxisTime, base: AxisTime, over: float, step_s: float) -> str:
    if axis.call_s <= 1.05 * base.call_s:
        if axis.axis not in ("dp", "edp") or over <= 1:
            return ""
        return (
            f"{name} does not notice the oversubscription: {axis.far_share:.0%} of its messages pass the top tier, "
            "since a ring leaves a pod once for all its members there."
        )
    more = axis.total_s - base.total_s
    cause = (
        f"{axis.far_share:.0%} of its messages pass the top tier, which has a {over:g}th of the bandwidth below it"
        if axis.far_share and over > 1
        else "its messages hash onto the same links"
    )
    return (
        f"{name} takes {axis.call_s / base.call_s:.1f} times as long as on a 1 : 1 fabric with adaptive routing, "
        f"{quantity(more, 's')} more in each step ({more / step_s:.0%} of it, where nothing hides it): {cause}."
    )
