"""`cumulo simulate network`: collectives and other traffic over a fabric, link by link, in virtual time."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cumulo.cli.network.options import NetworkOptions
from cumulo.cli.shared.declare import takes_options

if TYPE_CHECKING:
    from cumulo.base.report import Row
    from cumulo.collectives.simulate.fabrics.links import FabricGraph, Routing
    from cumulo.collectives.simulate.player import LinkChange, NetworkRun, NetworkTraffic

EXAMPLE = (
    "Example: [bold]cumulo simulate network --gpus 1024 --fabric fat-tree-roce --size 1GiB --routing ecmp "
    "--queue-pairs 4 --heat-map links.svg[/bold]"
)
_MOST_PORT = 512  # senders of an incast whose port is played step by step


@takes_options
def network(chosen: NetworkOptions) -> None:
    """Simulate collectives on a fabric, link by link: routing, sharing, failures, several jobs at once."""
    from cumulo.cli.shared.terminal import note, working

    began_s = time.process_time()
    if chosen.train:
        from cumulo.cli.view.network_step import print_step

        print_step(chosen)
        note(f"simulated in {time.process_time() - began_s:.2f} s of CPU time")
        return
    if chosen.algorithm == "switchml" and not chosen.job:
        from cumulo.cli.view.network_switch import print_switch

        print_switch(chosen)
        note(f"simulated in {time.process_time() - began_s:.2f} s of CPU time")
        return
    with working("simulating"):
        graph = graph_of(chosen)
        jobs = _jobs(chosen, graph)
        run = _play(chosen, graph, jobs)
    _report(chosen, graph, run, jobs, time.process_time() - began_s)


def graph_of(chosen: NetworkOptions) -> "FabricGraph":
    from cumulo.base.quantities import parse_duration_s
    from cumulo.collectives.simulate.fabrics.build import JoinedSites, TorusGraph, fabric_graph
    from cumulo.errors import ConfigError
    from cumulo.spec.catalog import shipped

    cluster = chosen.cluster.cluster(shipped(chosen.catalog_file))
    if chosen.torus:
        try:
            shape = tuple(int(part) for part in chosen.torus.lower().split("x"))
        except ValueError as error:
            raise ConfigError(f"--torus must look like 8x8x8, got {chosen.torus!r}") from error
        return TorusGraph(shape, cluster.device.link_bytes_per_s / (2 * len(shape)), 1e-6)
    if chosen.oversubscription:
        ratios = tuple(float(part) for part in chosen.oversubscription.split(","))
        cluster = replace(cluster, fabric=replace(cluster.fabric, oversubscription=ratios))
    sites = [fabric_graph(cluster, pod_gpus=chosen.pod_gpus or None) for _ in range(chosen.sites)]
    if chosen.sites == 1:
        return sites[0]
    return JoinedSites(sites, chosen.site_gbps * 1e9 / 8, parse_duration_s(chosen.site_delay, "--site-delay"))


def routing_of(chosen: NetworkOptions) -> "Routing":
    from cumulo.collectives.simulate.fabrics.links import Routing

    return Routing(chosen.routing, chosen.queue_pairs, chosen.seed)  # type: ignore[arg-type]


def _jobs(chosen: NetworkOptions, graph: "FabricGraph") -> list["NetworkTraffic"]:
    from cumulo.collectives.simulate.collective_traffic import collective_traffic
    from cumulo.collectives.simulate.fabrics.build import TorusGraph
    from cumulo.collectives.simulate.place import parse_job, placed

    per_node = getattr(graph, "node_gpus", 0) or _per_node(chosen)
    texts = chosen.job or [f"{chosen.collective}:gpus=0-{graph.ranks - 1}"]
    found: list[NetworkTraffic] = []
    for text in texts:
        job = parse_job(text, chosen.collective, chosen.algorithm, chosen.size)
        if isinstance(graph, TorusGraph):
            gpus, near = graph.snake()[job.first : job.last + 1], 1
        else:
            gpus, near = placed(job.first, job.last, chosen.placement, per_node, graph, chosen.seed), per_node
        found.append(
            collective_traffic(
                job.name,
                job.collective,
                job.algorithm,
                gpus,
                job.size_bytes,
                near,
                job.start_s,
                job.background,
            )
        )
    return found


def _per_node(chosen: NetworkOptions) -> int:
    from cumulo.spec.catalog import shipped

    return chosen.cluster.cluster(shipped(chosen.catalog_file)).node.gpus


def _play(chosen: NetworkOptions, graph: "FabricGraph", jobs: list["NetworkTraffic"]) -> "NetworkRun":
    from cumulo.base.quantities import parse_bytes, parse_duration_s
    from cumulo.collectives.simulate.player import play_network

    window = parse_bytes(chosen.window)
    return play_network(
        graph,
        jobs,
        routing_of(chosen),
        [_change(text, graph) for text in chosen.fail],
        parse_duration_s(chosen.step_latency, "--step-latency"),
        window or None,
        record=True,
    )


def _change(text: str, graph: "FabricGraph") -> "LinkChange":
    from cumulo.base.quantities import parse_duration_s, parse_number
    from cumulo.collectives.simulate.player import LinkChange
    from cumulo.errors import ConfigError

    name, at, rest = text.rpartition("@")
    when, equals, rate = rest.partition("=")
    if not at or not equals:
        raise ConfigError(f"--fail must look like 'leaf 0 → spine 3@1ms=0', got {text!r}")
    gbps = parse_number(rate, "the rate of --fail in Gbit/s")
    link = graph.links.named(name.strip().replace("->", "→"))
    return LinkChange(parse_duration_s(when, "the time of --fail"), link, gbps * 1e9 / 8)


def _incast_rows(chosen: NetworkOptions, ranks: int) -> "list[Row]":
    """The port's queue and pauses, with DCQCN and without."""
    from cumulo.base.quantities import parse_bytes
    from cumulo.base.report import Row
    from cumulo.collectives.simulate.congestion import CongestionControl, play_incast
    from cumulo.spec.catalog import shipped

    rate = chosen.cluster.cluster(shipped(chosen.catalog_file)).node.nic_bytes_per_s
    size = min(parse_bytes(chosen.size), 64e6)
    rows = []
    for name, control in (("PFC alone", None), ("DCQCN and PFC", CongestionControl())):
        run = play_incast(ranks - 1, size, rate, control)
        note = f"{size / 1e6:.0f} MB from each; peak queue {run.peak_queue_bytes / 1e6:.1f} MB"
        rows.append(Row(f"{name}: senders paused", 100 * run.paused_share, "%", "lower", note=note))
        rows.append(Row(f"{name}: use of the port", 100 * run.use, "%"))
    return rows


def _report(
    chosen: NetworkOptions,
    graph: "FabricGraph",
    run: "NetworkRun",
    jobs: list["NetworkTraffic"],
    cpu_s: float,
) -> None:
    from cumulo.base import report as reports
    from cumulo.cli.shared.terminal import note, out
    from cumulo.cli.view.network_run import job_rows, tier_rows, write_heat_map

    rows = job_rows(run, jobs) + tier_rows(run)
    if chosen.collective == "incast" and not chosen.job and 1 < graph.ranks <= _MOST_PORT:
        rows += _incast_rows(chosen, graph.ranks)
    reports.write_json(chosen.json_file, rows, cpu_s=cpu_s, messages=run.messages, solves=run.solves)
    if str(chosen.json_file) != "-":
        out.print(reports.table(f"{graph.ranks:,} GPUs, {chosen.routing} routing", rows))
        if run.rerouted:
            out.print(f"Messages that took another path because a link failed: {run.rerouted:,}.")
        note(
            f"{run.messages:,} messages on {len(graph.links.capacity):,} links, in {cpu_s:.2f} s of CPU "
            f"time; rates "
            f"were worked out {run.solves:,} time{'' if run.solves == 1 else 's'}"
        )
    if chosen.heat_map is not None and run.use is not None:
        write_heat_map(chosen.heat_map, run, f"{graph.ranks:,} GPUs, {chosen.routing} routing")
