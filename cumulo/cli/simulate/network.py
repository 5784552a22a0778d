"""`cumulo simulate network`: collectives and other traffic over a fabric, link by link, in virtual time."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cumulo.base import report as reports
from cumulo.base.quantities import parse_bytes, parse_duration_s, parse_number
from cumulo.base.report import Row
from cumulo.cli.shared.declare import Panel, takes_options
from cumulo.cli.shared.terminal import note, only_json, out, working
from cumulo.errors import ConfigError

if TYPE_CHECKING:
    from cumulo.base.report import Row
    from cumulo.collectives.simulate.fabrics.links import FabricGraph, Routing
    from cumulo.collectives.simulate.player import LinkChange, NetworkRun, NetworkTraffic
from dataclasses import dataclass
from pathlib import Path

from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared

_FABRIC, _TRAFFIC, _REPORT = map(Panel, ("Fabric", "Traffic", "Report"))


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    cluster: shared.ClusterOptions
    oversubscription: str = _FABRIC(
        "Oversubscription of each tier above the leaves, such as 1,7. Default: the fabric's own.", ""
    )
    pod_gpus: int = _FABRIC("GPUs below one spine layer; 0: as many as its ports allow.", 0)
    torus: str = _FABRIC("Instead of switches: a torus of these dimensions, such as 8x8x8.", "")
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
        "multi-ring (a ring for each rail), or an algorithm of `cumulo collective`; switchml is played packet by "
        "packet, with losses.",
        "multi-ring",
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
    slots: int = _TRAFFIC(
        "With switchml: slots of the switch's pool; 0: as many as the link's rate needs.", 0, min=0
    )
    loss: float = _TRAFFIC("With switchml: share of packets that are lost, each way.", 0.0, min=0.0, max=0.9)
    resend: str = _TRAFFIC("With switchml: time after which a worker sends a packet again.", "1ms")
    train: str = _TRAFFIC(
        "Play a whole training step's communication of this model instead; see --layout.", ""
    )
    layout: str = _TRAFFIC("With --train: for example dp=128,tp=8,pp=16,zero=1.", "dp=1,tp=8,pp=1")
    batch: shared.BatchOptions = shared.BatchOptions()
    order: str = _TRAFFIC("With --train: outermost axis of the mesh, pp or dp.", "pp")
    heat_map: Path | None = _REPORT(
        "Write a heat map of links over time (.svg or .html).", None, metavar="FILE"
    )
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None


EXAMPLE = (
    "Example: [bold]cumulo simulate network --gpus 1024 --fabric fat-tree-roce --size 1GiB --routing ecmp "
    "--queue-pairs 4 --heat-map links.svg[/bold]"
)
_MOST_PORT = 512  # senders of an incast whose port is played step by step


@takes_options
def network(chosen: NetworkOptions) -> None:
    """Simulate collectives on a fabric, link by link: routing, sharing, failures, several jobs at once."""
    began_s = time.process_time()
    if chosen.train:
        from cumulo.cli.simulate.network_report import print_step

        print_step(chosen)
        note(f"simulated in {time.process_time() - began_s:.2f} s of CPU time")
        return
    if chosen.algorithm == "switchml" and not chosen.job:
        from cumulo.cli.simulate.network_report import print_switch

        print_switch(chosen)
        note(f"simulated in {time.process_time() - began_s:.2f} s of CPU time")
        return
    with working("simulating"):
        graph = graph_of(chosen)
        jobs = _jobs(chosen, graph)
        run = _play(chosen, graph, jobs)
    _report(chosen, graph, run, jobs, time.process_time() - began_s)


def graph_of(chosen: NetworkOptions) -> "FabricGraph":
    from cumulo.collectives.simulate.fabrics.build import JoinedSites, TorusGraph, fabric_graph
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
    from cumulo.collectives.simulate.player import LinkChange

    name, at, rest = text.rpartition("@")
    when, equals, rate = rest.partition("=")
    if not at or not equals:
        raise ConfigError(f"--fail must look like 'leaf 0 → spine 3@1ms=0', got {text!r}")
    gbps = parse_number(rate, "the rate of --fail in Gbit/s")
    link = graph.links.named(name.strip().replace("->", "→"))
    return LinkChange(parse_duration_s(when, "the time of --fail"), link, gbps * 1e9 / 8)


def _incast_rows(chosen: NetworkOptions, ranks: int) -> "list[Row]":
    """The port's queue and pauses, with DCQCN and without."""
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
    from cumulo.cli.simulate.network_report import job_rows, tier_rows, write_heat_map

    rows = job_rows(run, jobs) + tier_rows(run)
    if chosen.collective == "incast" and not chosen.job and 1 < graph.ranks <= _MOST_PORT:
        rows += _incast_rows(chosen, graph.ranks)
    reports.write_json(chosen.json_file, rows, cpu_s=cpu_s, messages=run.messages, solves=run.solves)
    if not only_json(chosen.json_file):
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
