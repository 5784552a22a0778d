"""The options that `cumulo simulate` and `cumulo plan serve` share, and the objects made from them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cumulo.cli.shared.traffic_options import ARRIVALS

if TYPE_CHECKING:
    from cumulo.plan.serve.traffic import Slo, Traffic
    from cumulo.spec.catalog import Catalog
    from cumulo.spec.model import ModelSpec

TRAFFIC = "Traffic"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model name from the catalogue, such as llama-3.1-8b, or a folder with a config.json.",
    ),
]
Arrivals = Annotated[str, typer.Option(help=ARRIVALS, rich_help_panel=TRAFFIC)]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Replay a trace: JSON Lines with arrival_s, prompt_tokens, output_tokens and, for prompts with a "
        "shared prefix, prefix and prefix_tokens; or a public trace (Azure, BurstGPT, Mooncake).",
        rich_help_panel=TRAFFIC,
    ),
]
Requests = Annotated[
    int, typer.Option(help="Number of requests to simulate at each rate.", rich_help_panel=TRAFFIC)
]
SeedOption = Annotated[
    int, typer.Option(help="Random seed. The same seed gives the same traffic.", rich_help_panel=TRAFFIC)
]
SloOption = Annotated[
    str,
    typer.Option(help="Latency objective (SLO), for example ttft=500ms,itl=50ms.", rich_help_panel=TRAFFIC),
]
SloPercentile = Annotated[
    float, typer.Option(help="Percentile of TTFT and ITL that must meet the SLO.", rich_help_panel=TRAFFIC)
]
CatalogFile = Annotated[
    Path | None,
    typer.Option("--catalog", metavar="FILE", help="A YAML file with devices and models of your own."),
]


def load_catalog(path: Path | None) -> "Catalog":
    from cumulo.spec.catalog import Catalog, shipped

    return shipped() if path is None else Catalog.load(path)


def model_spec(name: str, catalog: "Catalog") -> "ModelSpec":
    """A name of the catalogue, or a folder (or file) with a Hugging Face configuration."""
    import json

    from cumulo.errors import ModelError
    from cumulo.spec.from_huggingface import spec_from_config

    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() or name in catalog.names("models"):
        return catalog.model(name)
    try:
        return spec_from_config(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the configuration {file}: {error}") from error


def parse_objective(text: str, percentile: float) -> "Slo | None":
    from cumulo.errors import ConfigError
    from cumulo.load.slo import parse_slo
    from cumulo.plan.serve.traffic import Slo

    if not text:
        return None
    bounds = parse_slo(text)
    if bounds.tpot_s is not None or bounds.e2e_s is not None:
        raise ConfigError("a simulated SLO can bound only ttft and itl: remove tpot and e2e from --slo")
    return Slo(bounds.ttft_s, bounds.itl_s, percentile)


def make_traffic(
    input_tokens: str, output_tokens: str, shared_prefix: int, prefixes: int, arrivals: str, trace: Path | None,
    requests: int, seed: int,
) -> "Traffic":  # fmt: skip
    """Recorded, or drawn at one request per second; rates stretch its time."""
    import itertools
    import random

    from cumulo.errors import ConfigError
    from cumulo.load.arrivals import Arrivals as Process
    from cumulo.load.arrivals import parse_process
    from cumulo.load.lengths import parse_lengths
    from cumulo.plan.serve.traffic import drawn_traffic

    if trace is not None:
        return read_any_trace(trace)
    if requests < 2:
        raise ConfigError(
            f"--requests must be 2 or more, because a rate needs two arrivals; got {requests} (1000 is usual)"
        )
    process, burst = parse_process(arrivals)
    times_s = Process(1.0, process, burst).times_s(random.Random(f"{seed}/arrivals"))
    return drawn_traffic(
        requests, parse_lengths(input_tokens, "--input").draw, parse_lengths(output_tokens, "--output").draw,
        times_s=list(itertools.islice(times_s, requests)), prefix_tokens=shared_prefix, prefixes=prefixes,
        seed=seed,
    )  # fmt: skip


def read_any_trace(path: Path) -> "Traffic":
    """Our own JSON lines, or one of the public traces that the load generator reads, too."""
    from cumulo.engine.simulate.run import Arrival
    from cumulo.load.trace import read_trace
    from cumulo.plan.serve.traffic import Traffic, read_traffic

    if path.is_file() and '"arrival_s"' in path.read_text("utf-8", "replace").partition("\n")[0]:
        return read_traffic(path)
    block = 512  # tokens that a hash of Mooncake's traces stands for
    return Traffic(
        tuple(
            Arrival(
                row.time_s, row.input_tokens, row.output_tokens, tuple((name, block) for name in row.blocks)
            )
            for row in read_trace(path)
        )
    )
