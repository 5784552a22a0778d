"""Options that `cumulo plan`, `cumulo simulate` and `cumulo bench serve` share."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from cumulo.cli.shared.declare import Panel, option
from cumulo.cli.shared.options import TierOptions
from cumulo.cli.shared.terminal import note
from cumulo.errors import ConfigError
from cumulo.load.simulated import draw_traffic, read_traffic
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec.catalog import Catalog
from cumulo.spec.cluster import Cluster

REQUESTS, TRAFFIC, CLUSTER, TRAINING, DEPLOYMENT = map(
    Panel, ("Requests", "Traffic", "Cluster", "Training", "Deployment")
)
ARRIVALS = "Arrival process: poisson, constant or burst:SIZE."
_LENGTHS = "128, uniform:64-256, normal:MEAN,SD, lognormal:MEDIAN,SIGMA or file:LENGTHS.txt"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model name from the catalogue, such as llama-3.1-8b, or a folder with a config.json.",
    ),
]
CatalogFile = Annotated[
    Path | None,
    typer.Option("--catalog", help="A YAML file with devices and models of your own."),
]


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    gpus: int | None = CLUSTER(
        "Number of GPUs, of which the plan uses all. Required; for --device cpu the default is 1.", None
    )
    device: str | None = CLUSTER(
        "Device, by its name in the catalogue, in which cpu is a socket of 56 cores. Default: h100-sxm.", None
    )
    node: str | None = CLUSTER(
        "Node type, by its name in the catalogue. Default: the first one with the device.", None
    )
    fabric: str = CLUSTER("Network fabric, by its name in the catalogue.", "rail-infiniband")

    def cluster(self, catalog: Catalog) -> Cluster:
        one = catalog.cluster(1, self.known_device, self.node, self.fabric)
        if self.gpus is None and one.device.generation != "cpu":
            raise ConfigError(f"--gpus is missing: say how many {one.device.name} the cluster has")
        return one if self.gpus is None else replace(one, gpus=self.gpus)

    @property
    def known_device(self) -> str | None:
        return self.device if self.device or self.node else "h100-sxm"


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    batch: int = TRAINING("Global batch size, in sequences per step.", 1024)
    sequence: int = TRAINING("Sequence length, in tokens.", 4096)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What requests look like."""

    input_tokens: str = REQUESTS(f"Prompt length in tokens: {_LENGTHS}.", "512", "--input")
    output_tokens: str = REQUESTS("Answer length in tokens, in the same forms as --input.", "128", "--output")
    shared_prefix: int = REQUESTS("Length of a prefix that requests share, in tokens.", 0, min=0)
    prefixes: int = REQUESTS("Number of different shared prefixes.", 1, min=1)


@dataclass(frozen=True, kw_only=True)
class TrafficOptions:
    """Simulated traffic: drawn, or a trace."""

    requested: RequestOptions = RequestOptions()
    arrivals: str = TRAFFIC(ARRIVALS, "poisson")
    trace: Path | None = TRAFFIC(
        "Replay a trace: JSON Lines with arrival_s, prompt_tokens, output_tokens and, for prompts with a shared "
        "prefix, prefix and prefix_tokens; or a public trace (Azure, BurstGPT, Mooncake).",
        None,
    )
    requests: int = TRAFFIC("Number of requests to simulate at each rate.", 1000)
    seed: int = TRAFFIC("Random seed. The same seed gives the same traffic.", 0)

    def traffic(self, max_context: int) -> Traffic:
        """For a model that takes prompts of up to `max_context` tokens with their answers."""
        if self.trace is not None:
            return _fitting(read_traffic(self.trace), max_context)
        lengths = self.requested
        return draw_traffic(
            lengths.input_tokens,
            lengths.output_tokens,
            lengths.shared_prefix,
            lengths.prefixes,
            self.arrivals,
            self.requests,
            self.seed,
        )


def _fitting(recorded: Traffic, max_context: int) -> Traffic:
    """Without the requests that any server of the model would refuse, if they are the fewer ones."""
    kept = tuple(one for one in recorded.arrivals if one.prompt_tokens + one.output_tokens <= max_context)
    every, long = len(recorded.arrivals), len(recorded.arrivals) - len(kept)
    longer = f"longer, with their answers, than the {max_context:,} tokens that the model supports"
    if 2 * long > every:
        raise ConfigError(f"{long:,} of the trace's {every:,} requests are {longer}: choose another model")
    if long:
        note(f"{long:,} of the trace's {every:,} requests are left out: they are {longer}")
    return Traffic(kept)


def kv_format(text: str) -> str:
    """--kv as a replica takes it."""
    if text not in ("", "bfloat16", "float8"):
        raise ConfigError(f"--kv takes bfloat16 and float8; got {text!r}")
    return text if text == "float8" else ""


SloOption = Annotated[
    str,
    typer.Option(help="Latency objective (SLO), for example ttft=500ms,itl=50ms.", rich_help_panel=TRAFFIC),
]
SloPercentile = Annotated[
    float, typer.Option(help="Percentile of TTFT and ITL that must meet the SLO.", rich_help_panel=TRAFFIC)
]


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    PANEL: ClassVar[Panel] = Panel("Speculation")

    acceptance: float = option(
        "Speculation: how often a drafted token is right, those before it being right, 0 to 1; 0: no speculation. "
        "The scheduler chooses how many to draft.",
        0.0,
        min=0,
        max=1,
    )
    speculate: str = option(
        "With --acceptance: what drafts. ngram: repeated text, at no cost; DIR: an EAGLE-3 head in this folder, "
        "which need not exist yet.",
        "ngram",
        metavar="ngram|DIR",
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """What each engine of a simulated deployment has."""

    max_loras: int = DEPLOYMENT(
        "Number of low-rank adapters that every engine has in memory, asked for equally often.",
        0,
        min=0,
        max=4096,
    )
    max_lora_rank: int = DEPLOYMENT("With --max-loras: their highest rank.", 16, min=1, max=4096)
    drafts: DraftOptions = DraftOptions()
    stores: TierOptions = TierOptions()
    disk_gb_s: float = option(
        "With --kv-disk: speed at which an engine reads its files, with their checksums, in GB/s. The default "
        "is that of one core of a Neoverse-N1.",
        0.5,
        "--disk-gb-s",
        panel=TierOptions.PANEL,
    )

    def fields(self) -> dict[str, Any]:
        """Fields of a simulated replica."""
        if not self.drafts.speculate:
            raise ConfigError(
                "--speculate must be ngram or the folder of a head; for no speculation, omit --acceptance"
            )
        if not 0 < self.disk_gb_s < float("inf"):
            raise ConfigError(f"--disk-gb-s must be more than 0 GB/s, got {self.disk_gb_s:g}")
        return {
            "max_loras": self.max_loras,
            "max_lora_rank": self.max_lora_rank,
            **vars(self.drafts),
            **self.stores.config(),
            "disk_bytes_per_s": 1e9 * self.disk_gb_s,
        }
