"""What `cumulo train` does with a configuration of `kind: eagle`: trains a head that drafts for a given model."""

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cumulo.base.report import Row, table, write_json
from cumulo.cli.shared.terminal import err, note, out
from cumulo.train.head.config import HeadConfig


def train_head(config: HeadConfig, json_file: Path | None) -> None:
    with err.status("starting"):
        from cumulo.train.head.trainer import HeadTrainer
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=err,
    )
    tasks: dict[str, TaskID] = {}

    def tell(what: str, done: int, total: int) -> None:
        stage = what.split(",")[0]
        if stage not in tasks:
            tasks[stage] = bars.add_task(what, total=total)
        bars.update(tasks[stage], completed=done, description=what)

    with bars:
        result = HeadTrainer(config, tell).run()
    rows = [
        Row(
            f"{name}: proposal {index}, right", shares[0], "of 1",
            note=f"those before it being right; among two choices {shares[1]:.0%}, among four {shares[3]:.0%}",
        )
        for name, proposals in result.right.items()
        for index, shares in enumerate(proposals, 1)
    ]  # fmt: skip
    rows += [
        Row("tokens the head can propose", result.known_share, "of 1"),
        Row("loss", result.loss, better="lower"),
        Row("trained on", result.tokens, "tokens", note=f"{result.answers} answers of the model itself"),
        Row("took", result.seconds, "s", better="lower"),
    ]
    if str(json_file) != "-":
        out.print(table("draft head", rows))
    write_json(json_file, rows)
    note(f"to use it: cumulo serve --speculate {result.folder}")
