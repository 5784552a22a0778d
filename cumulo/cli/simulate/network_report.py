"""A simulated network run for people: rows and pictures of `cumulo simulate network`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cumulo.base.files import write_text_file
from cumulo.base.quantities import parse_bytes, parse_duration_s, quantity
from cumulo.base.report import ReportTable, Row, write_json
from cumulo.cli.shared.terminal import only_json, out, show_report, working
from cumulo.collectives.simulate.fabrics.build import fabric_graph
from cumulo.collectives.simulate.fabrics.links import Routing
from cumulo.collectives.simulate.link_use import heat_map, heat_map_page
from cumulo.collectives.simulate.place import placed, pods_of
from cumulo.collectives.simulate.player import NetworkRun, NetworkTraffic
from cumulo.errors import ConfigError
from cumulo.plan.search.fixed import fixed_job
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.time.step import estimate
from cumulo.plan.time.step_traffic import AxisTime, play_step, step_calls
from cumulo.spec.catalog import shipped


def job_rows(run: NetworkRun, jobs: Sequence[NetworkTraffic]) -> list[Row]:
    return [
        Row(f"{job.name}: time", run.ends_s[job.name] - job.start_s, "s", "lower", more={"job": job.name})
        for job in jobs
        if job.name in run.ends_s
    ]


def tier_rows(run: NetworkRun) -> list[Row]:
    if run.use is None:
        return []
    found = []
    for tier, (mean, most) in run.use.by_tier().items():
        note = f"busiest link {most:.0%}"
        found.append(Row(f"{tier}: mean use of used links", 100 * mean, "%", note=note, more={"most": most}))
    return found


def write_heat_map(path: Path, run: NetworkRun, title: str) -> None:
    assert run.use is not None
    picture = heat_map(run.use, title)
    lines = [f"{name}: {quantity(end_s, 's')}" for name, end_s in run.ends_s.items()]
    text = heat_map_page(picture, title, lines) if path.suffix == ".html" else picture
    write_text_file(path, text)


if TYPE_CHECKING:
    from cumulo.cli.simulate.network import NetworkOptions

# Packets of all workers that are played; longer collectives go on at the same pace. With losses the unluckiest slot
# decides, which a short part does not show.
_MOST_PACKETS, _MOST_WITH_LOSSES = 60_000, 300_000
_LEAST_ROUNDS = 8  # of the pool, so that its start counts little


def print_switch(chosen: "NetworkOptions") -> None:
    from cumulo.collectives.simulate.switch_packets import PACKET_BYTES, SwitchLinks, play_switch
    from cumulo.spec.catalog import shipped

    cluster = chosen.cluster.cluster(shipped(chosen.catalog_file))
    if chosen.collective != "all_reduce" or cluster.gpus > cluster.fabric.switch_ports:
        raise ConfigError(
            f"switchml is an all-reduce of the workers of one switch: take --collective all_reduce and at most "
            f"{cluster.fabric.switch_ports} --gpus, the ports of a switch of {cluster.fabric.name}"
        )
    links = SwitchLinks(
        cluster.gpus,
        cluster.node.nic_bytes_per_s,
        cluster.fabric.latency_s / 2,
        chosen.loss,
        parse_duration_s(chosen.resend, "--resend"),
        chosen.seed,
    )
    size = parse_bytes(chosen.size)
    slots = chosen.slots or links.slots_for_line_rate
    packets = max(1, -(-int(size) // PACKET_BYTES))
    most = _MOST_WITH_LOSSES if chosen.loss else _MOST_PACKETS
    played = min(packets, max(_LEAST_ROUNDS * slots, most // cluster.gpus))
    with working("simulating"):
        run = play_switch(links, played, slots)
    seconds = run.seconds * packets / played
    note = "" if played == packets else f"from its first {played:,} of {packets:,} packets"
    rate = size / seconds
    ring_s = 2 * (cluster.gpus - 1) / cluster.gpus * size / links.bytes_per_s
    rows = [
        Row("right on every worker", run.right, must=True),
        Row("time", seconds * 1e3, "ms", "lower", note=note),
        Row("a ring over the same links", ring_s * 1e3, "ms", "lower", note="its bytes alone"),
        Row("added up", rate / 1e9, "GB/s", note=f"{rate / links.bytes_per_s:.0%} of a worker's link"),
        Row("slots of the pool", slots, note=f"{links.slots_for_line_rate} keep the link busy"),
        Row("memory of the pool", 2 * slots * PACKET_BYTES / 1024, "KiB", "lower", note="two copies of each slot"),
        Row("packets lost", 100 * run.lost / max(1, run.sent * 2), "%", "lower"),
        Row("packets sent again", 100 * run.again / max(1, run.sent), "%", "lower"),
    ]  # fmt: skip
    show_report(f"SwitchML, {cluster.gpus} workers of one switch", rows, chosen.json_file)


if TYPE_CHECKING:
    from cumulo.cli.simulate.network import NetworkOptions


def print_step(chosen: "NetworkOptions") -> None:
    if chosen.order not in ("pp", "dp"):
        raise ConfigError(f"--order must be pp or dp, got {chosen.order!r}")
    catalog = shipped(chosen.catalog_file)
    cluster = chosen.cluster.cluster(catalog)
    if chosen.oversubscription:
        ratios = tuple(float(part) for part in chosen.oversubscription.split(","))
        cluster = replace(cluster, fabric=replace(cluster.fabric, oversubscription=ratios))
    goal = TrainGoal(catalog.model_or_file(chosen.train), cluster, chosen.batch.batch, chosen.batch.sequence)
    job = fixed_job(chosen.layout, goal)
    flat = replace(cluster, fabric=replace(cluster.fabric, oversubscription=(1.0,)))
    routing = Routing(chosen.routing, chosen.queue_pairs, chosen.seed)  # type: ignore[arg-type]
    overhead_s = parse_duration_s(chosen.step_latency, "--step-latency")
    with working("simulating"):
        found = []
        for one, how in ((cluster, routing), (flat, Routing("adaptive"))):
            graph = fabric_graph(one, pod_gpus=chosen.pod_gpus or None)
            calls = step_calls(job, one.node.gpus, chosen.order)  # type: ignore[arg-type]
            gpus = placed(0, one.gpus - 1, chosen.placement, one.node.gpus, graph, chosen.seed)
            found.append(list(play_step(calls, graph, how, gpus, overhead_s)))
        step_s = estimate(job, flat, explain=False).step_s
    mine, ideal = found
    rows = [row for pair in zip(mine, ideal, strict=True) for row in _rows(*pair)]
    total, least = sum(axis.total_s for axis in mine), sum(axis.total_s for axis in ideal)
    rows.append(Row("all communication", total, "s", "lower"))
    rows.append(Row("all communication, 1 : 1 and adaptive", least, "s", "lower"))
    rows.append(Row("step on a 1 : 1 fabric, cost model", step_s, "s", "lower"))
    write_json(chosen.json_file, rows)
    if only_json(chosen.json_file):
        return
    pods = pods_of(fabric_graph(cluster, pod_gpus=chosen.pod_gpus or None))
    title = f"{chosen.train}, {chosen.layout}, on {cluster.gpus:,} GPUs in {pods} pods, {chosen.placement}"
    out.print(_table(title, mine, ideal))
    out.print(f"A step takes {quantity(step_s, 's')} on a 1 : 1 fabric by the cost model.")
    out.print(
        "slower: times what it takes on a 1 : 1 fabric with adaptive routing. far: messages that pass the "
        "top tier.",
        style="dim",
    )
    for axis, base in zip(mine, ideal, strict=True):
        if (
            axis.axis in ("dp", "edp")
            and axis.call_s <= 1.05 * base.call_s
            and max(cluster.fabric.oversubscription) > 1
        ):
            out.print(
                f"{_name(axis)} does not notice the oversubscription: {axis.far_share:.0%} of its "
                "messages pass the top tier, since a ring leaves a pod once for all its members there."
            )
        if axis.call_s > 1.05 * base.call_s:
            out.print(_why(axis, base, cluster.fabric.oversubscription, step_s))


def _rows(axis: AxisTime, base: AxisTime) -> list[Row]:
    name = f"{axis.axis} {axis.collective}"
    more = {
        "calls": axis.calls,
        "size_bytes": axis.size_bytes,
        "ranks": axis.ranks,
        "far_share": axis.far_share,
    }
    return [
        Row(f"{name}: in a step", axis.total_s, "s", "lower", more=more),
        Row(f"{name}: times its 1 : 1 time", axis.call_s / base.call_s, "", "lower"),
    ]


def _table(title: str, mine: list[AxisTime], ideal: list[AxisTime]) -> ReportTable:
    headings = [
        "axis",
        "collective",
        "ranks",
        "size",
        "calls",
        "a call",
        "in a step",
        "slower",
        "far",
        "busiest",
    ]
    rows = [
        (
            [
                axis.axis, axis.collective.replace("_", "-"), f"{axis.ranks:,}", quantity(axis.size_bytes, "B"),
                f"{axis.calls:,}", quantity(axis.call_s, "s"), quantity(axis.total_s, "s"),
                f"{axis.call_s / base.call_s:.2f} ×", f"{axis.far_share:.0%}", axis.busiest,
            ],
            "",
        )
        for axis, base in zip(mine, ideal, strict=True)
    ]  # fmt: skip
    return ReportTable(title, headings, [1 < place < 9 for place in range(len(headings))], rows)


def _name(axis: AxisTime) -> str:
    return f"{axis.axis} {axis.collective.replace('_', '-')}"


def _why(axis: AxisTime, base: AxisTime, ratios: tuple[float, ...], step_s: float) -> str:
    more = axis.total_s - base.total_s
    over = max(ratios)
    cause = (
        f"{axis.far_share:.0%} of its messages pass the top tier, which has a {over:g}th of the bandwidth below it"
        if axis.far_share and over > 1
        else "its messages hash onto the same links"
    )
    return (
        f"{_name(axis)} takes {axis.call_s / base.call_s:.1f} times as long as on a 1 : 1 "
        f"fabric with "
        f"adaptive routing, {quantity(more, 's')} more in each step ({more / step_s:.0%} of it, where "
        f"nothing hides "
        f"it): {cause}."
    )
