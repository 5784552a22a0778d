"""The options of `cumulo simulate network`."""

from dataclasses import dataclass
from pathlib import Path

from cumulo.cli.shared import options
from cumulo.cli.shared import plan_options as shared
from cumulo.cli.shared.declare import option

_FABRIC, _TRAFFIC, _REPORT = "Fabric", "Traffic", "Report"


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    cluster: shared.ClusterOptions
    oversubscription: str = option(
        "Oversubscription of each tier above the leaves, such as 1,7. Default: the fabric's own.",
        "",
        panel=_FABRIC,
    )
    pod_gpus: int = option("GPUs below one spine layer; 0: as many as its ports allow.", 0, panel=_FABRIC)
    torus: str = option("Instead of switches: a torus of these dimensions, such as 8x8x8.", "", panel=_FABRIC)
    sites: int = option("Number of datacentres, of --gpus each.", 1, panel=_FABRIC, min=1)
    site_gbps: float = option(
        "With --sites: bandwidth between two sites, in Gbit/s, each way.", 1600.0, panel=_FABRIC
    )
    site_delay: str = option("With --sites: delay between two sites, one way.", "5ms", panel=_FABRIC)
    routing: str = option(
        "ecmp: by hash; static: by destination; adaptive: packets spread over all paths.",
        "ecmp",
        panel=_FABRIC,
    )
    queue_pairs: int = option(
        "Queue pairs of a message, each hashed by itself (ecmp).", 1, panel=_FABRIC, min=1
    )
    seed: int = option("Seed of the hash. Another seed is another cabling.", 0, panel=_FABRIC)
    collective: str = option(
        "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send (to the next rank) or incast (all to "
        "one).",
        "all_reduce",
        panel=_TRAFFIC,
    )
    algorithm: str = option(
        "multi-ring (a ring for each rail), or an algorithm of `cumulo collective`; switchml is played packet by "
        "packet, with losses.",
        "multi-ring",
        panel=_TRAFFIC,
    )
    size: str = option("Bytes of the collective, as nccl-tests counts them.", "1GiB", panel=_TRAFFIC)
    placement: str = option(
        "packed: rank i on GPU i; scattered: nodes in random order; interleaved: consecutive nodes in "
        "different pods.",
        "packed",
        panel=_TRAFFIC,
    )
    job: list[str] = option(
        "One of several jobs, as NAME:key=value,...: gpus=0-511, collective, algorithm, size, start (such as 1ms), "
        "background=yes. Repeat it for each job.",
        (),
        panel=_TRAFFIC,
        metavar="JOB",
    )
    fail: list[str] = option(
        "A link that changes, as LINK@TIME=GBPS, such as 'leaf 0 → spine 3@1ms=0'. Repeat it.",
        (),
        panel=_TRAFFIC,
        metavar="CHANGE",
    )
    step_latency: str = option(
        "Latency that software adds to every message, such as 14us for NCCL's Simple protocol.",
        "0us",
        panel=_TRAFFIC,
    )
    window: str = option(
        "Bytes that a queue pair may have under way, such as 16MiB; 0: no limit.", "0", panel=_TRAFFIC
    )
    slots: int = option(
        "With switchml: slots of the switch's pool; 0: as many as the link's rate needs.",
        0,
        panel=_TRAFFIC,
        min=0,
    )
    loss: float = option(
        "With switchml: share of packets that are lost, each way.", 0.0, panel=_TRAFFIC, min=0.0, max=0.9
    )
    resend: str = option(
        "With switchml: time after which a worker sends a packet again.", "1ms", panel=_TRAFFIC
    )
    train: str = option(
        "Play a whole training step's communication of this model instead; see --layout.", "", panel=_TRAFFIC
    )
    layout: str = option(
        "With --train: for example dp=128,tp=8,pp=16,zero=1.", "dp=1,tp=8,pp=1", panel=_TRAFFIC
    )
    batch: shared.BatchOptions = shared.BatchOptions()
    order: str = option("With --train: outermost axis of the mesh, pp or dp.", "pp", panel=_TRAFFIC)
    heat_map: Path | None = option(
        "Write a heat map of links over time (.svg or .html).", None, panel=_REPORT, metavar="FILE"
    )
    catalog_file: shared.CatalogFile = None
    json_file: options.JsonOption = None
