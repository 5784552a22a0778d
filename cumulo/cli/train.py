"""`cumulo train`: train a model from a configuration file, on own texts or conversations, or the built-in
two-minute run."""

from dataclasses import dataclass
from pathlib import Path

from cumulo.cli.shared import options
from cumulo.cli.shared.declare import argument, flag, option, takes_options
from cumulo.cli.shared.terminal import note

EXAMPLE = "Example: [bold]cumulo train --steps 20 --folder /tmp/first-run[/bold]"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    what: list[Path] | None = argument(
        "A configuration file, or data: text files, .jsonl, .json or .parquet files of texts or conversations, or "
        "folders of them. Default: a small model trained on Python's standard library.",
        None,
        "CONFIG.yaml|DATA...",
    )
    model: str | None = option(
        "Train this model further on the data, with low-rank adapters: a folder, a GGUF file, a Hugging Face "
        "name, or built-in. Default: a new small model for texts, the built-in model for conversations.",
        None,
        "--model",
        "-m",
    )
    changes: list[str] | None = option(
        "Change a setting, for example --set optimizer.learning_rate=1e-3. Can be given more than once.",
        None,
        "--set",
    )
    folder: Path | None = option("Folder of the run.", None, metavar="DIR")
    steps: int | None = option("Number of optimizer steps.", None)
    collective: str | None = option(
        "Algorithms of collectives between CPU ranks, such as all_reduce=ring, or auto for the tuner's "
        "choice. Default: torch.distributed's.",
        None,
        metavar="NAME=ALGORITHM",
    )
    collective_profile: str | None = option(
        "Choose the algorithms by what `cumulo bench collectives --profile FILE` measured.",
        None,
        metavar="FILE",
    )
    resume: bool = flag("Resume from the latest valid checkpoint in the folder.")
    take_over: bool = flag(
        "Take the folder from a process that trains in it: that one stops without writing."
    )
    show_config: bool = flag("Print the complete configuration and exit.")
    settings: bool = flag("Print every setting with its default and its meaning, and exit.")
    explain_layout: bool = flag("Print the place and the shards of every rank, and exit.")
    verify_layout: bool = flag(
        "Check on the CPU that the layout computes the same result as one process, and exit."
    )
    json_file: options.JsonOption = None


@takes_options
def train(chosen: TrainOptions) -> None:
    """Train a model. Ctrl-C saves a checkpoint and exits; --resume leads to the same result as an unbroken run.

    For a layout of several ranks, it starts one process per rank and restarts them when one dies. For several
    machines, run torchrun --nnodes 2 --nproc-per-node 8 ... -m cumulo train CONFIG.yaml on each.

    Text files train a new small model, conversations adapt an existing one; steps follow from how much there is.

    A configuration with kind: eagle trains a head that drafts for an existing model (cumulo serve --speculate DIR).

    The folder of the run contains model/ (for cumulo chat and transformers), checkpoints/, log.csv and loss.svg.
    """
    from cumulo.cli import train_run
    from cumulo.train.head.config import read_head_config
    from cumulo.train.run.configuration import configuration, is_configuration

    if chosen.settings:
        train_run.print_settings()
        return
    paths = chosen.what or []
    wanted = dict(train_run.parse_change(change) for change in chosen.changes or [])
    for name in ("folder", "steps", "collective", "collective_profile"):
        if (value := getattr(chosen, name)) is not None:
            wanted[name] = str(value)
    if (
        head := read_head_config(paths[0] if paths and is_configuration(paths[0]) else None, wanted)
    ) is not None:
        train_run.train_head(head, chosen.json_file)
        return
    config = configuration(paths, wanted, chosen.resume, note, chosen.model)
    if chosen.show_config:
        train_run.print_config(config)
    elif chosen.explain_layout:
        train_run.print_layout(config)
    elif chosen.verify_layout:
        train_run.print_verdict(config, chosen.json_file)
    else:
        train_run.run(config, chosen.resume, chosen.json_file, chosen.take_over)
