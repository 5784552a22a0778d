"""A training step's collectives as a table: `cumulo explain step N --folder RUN`."""

from pathlib import Path

from cumulo.base import report
from cumulo.base.quantities import quantity
from cumulo.cli.shared.terminal import out
from cumulo.errors import CumuloError


def print_step(folder: Path | None, step: int | None, json_file: Path | None) -> None:
    from cumulo.train.run.log import read_collectives, read_log

    if folder is None or step is None:
        raise CumuloError("say which step of which run: cumulo explain step 5 --folder runs/train")
    record = next((one for one in read_log(folder / "log.csv") if one.step == step), None)
    if record is None:
        raise CumuloError(f"{folder}/log.csv has no step {step}")
    found = [one for one in read_collectives(folder / "collectives.csv") if one.step == step]
    rows = [report.Row("step", record.step_s * 1e3, "ms", "lower", note=f"loss {record.loss:.3f}")]
    total = sum(one.seconds for one in found)
    share = f"{total / record.step_s:.0%} of the step; waiting for other ranks counts, overlapped time too"
    rows.append(report.Row("collectives of rank 0", total * 1e3, "ms", "lower", note=share))
    for one in found:
        name = f"{one.collective}, {one.ranks} ranks, {quantity(one.size_bytes, 'B')} × {one.calls}"
        note = f"bus bandwidth {one.bus_gb_s:.3f} GB/s; predicted {one.predicted_s * 1e3:,.2f} ms"
        rows.append(report.Row(name, one.seconds * 1e3, "ms", "lower", note=note))
    report.write_json(json_file, rows)
    if str(json_file) != "-":
        out.print(report.table(f"step {step} of {folder}", rows))
