"""A simulated network run for people: rows and pictures of `cumulo simulate network`."""

from collections.abc import Sequence
from pathlib import Path

from cumulo.base.files import write_text_file
from cumulo.base.quantities import quantity
from cumulo.base.report import Row
from cumulo.collectives.simulate.link_use import heat_map, heat_map_page
from cumulo.collectives.simulate.player import NetworkRun, NetworkTraffic


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
