"""Writes what watches a server into a folder: prometheus.yml, alerts.yaml, dashboard.json, training.json. For
operators:

python -m cumulo.serve.monitoring FOLDER
prometheus --config.file FOLDER/prometheus.yml
"""

import shutil
import sys
from pathlib import Path


def write(folder: Path) -> None:
    shutil.copytree(
        Path(__file__).parent,
        folder,
        ignore=shutil.ignore_patterns("*.py", "__pycache__"),
        dirs_exist_ok=True,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m cumulo.serve.monitoring FOLDER")
    write(Path(sys.argv[1]))
