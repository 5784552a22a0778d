"""Writes what watches a server into a folder: prometheus.yml, alerts.yaml, dashboard.json, training.json. For
operators:

python -m cumulo.serve.monitoring FOLDER
prometheus --config.file FOLDER/prometheus.yml
"""

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
import yaml

JOB = "cumulo"  # the alert rules expect this name


def write(folder: Path, targets: list[str], interval_s: int, training: list[str] | None = None) -> list[Path]:
    """The files; Prometheus will scrape `targets` and the runs of `training`, each HOST:PORT."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped = files("cumulo.serve.monitoring")
    settings = {
        "global": {"scrape_interval": f"{interval_s}s", "evaluation_interval": f"{interval_s}s"},
        "rule_files": ["alerts.yaml"],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": targets}]}],
    }
    if training:
        runs = {"job_name": "cumulo-train", "static_configs": [{"targets": training}]}
        settings["scrape_configs"] = [*settings["scrape_configs"], runs]
    texts = {
        "prometheus.yml": yaml.safe_dump(settings, sort_keys=False),
        "alerts.yaml": (shipped / "alerts.yaml").read_text("utf-8"),
        "dashboard.json": (shipped / "dashboard.json").read_text("utf-8"),
        "training.json": (shipped / "training.json").read_text("utf-8"),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in texts]


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.")],
    target: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="A server to scrape; may be repeated.")
    ] = None,
    training: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="A training run's metrics_port to scrape; may be repeated."),
    ] = None,
    interval: Annotated[int, typer.Option(min=1, help="Seconds between two scrapes.")] = 5,
) -> None:
    """Write Prometheus' settings, the alert rules and the Grafana dashboard for `cumulo serve`."""
    for path in write(folder, target or ["127.0.0.1:8000"], interval, training):
        print(path)


if __name__ == "__main__":
    typer.run(main)
