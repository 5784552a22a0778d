"""collectives.csv of a run: what each step's collectives took on the first rank, their bus bandwidth, and what the
cost model says. The trainer writes it; `cumulo explain step N --folder RUN` reads it."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from cumulo.collectives.decide.measured import CollectiveProfile
from cumulo.ranks.collectives import CollectiveTime
from cumulo.ranks.scheduled import host_seconds


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    step: int
    collective: str
    ranks: int
    size_bytes: int
    calls: int
    seconds: float  # all calls together, waiting for other ranks included
    bus_gb_s: float
    predicted_s: float  # of all calls, with links of one host to themselves


class CollectiveLog:
    def __init__(self, folder: Path, after_step: int, profile: CollectiveProfile | None = None) -> None:
        """Keep what an earlier run wrote up to `after_step`. `profile`: what was measured here predicts better than
        the cost model."""
        self._profile = profile
        path = folder / "collectives.csv"
        kept = [record for record in read_collectives(path) if record.step <= after_step]
        self._stream = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._stream, [field.name for field in fields(CollectiveRecord)])
        self._writer.writeheader()
        self._writer.writerows(map(asdict, kept))

    def write(self, step: int, times: Sequence[CollectiveTime]) -> list[CollectiveRecord]:
        records = []
        for one in times:
            known = self._profile.times(one.kind, one.size_bytes, one.ranks) if self._profile else {}
            each_s = min(known.values(), default=host_seconds(one.kind, one.size_bytes, one.ranks))
            predicted = one.calls * each_s
            record = CollectiveRecord(
                step,
                one.kind,
                one.ranks,
                one.size_bytes,
                one.calls,
                one.seconds,
                one.bus_bytes_per_s / 1e9,
                predicted,
            )
            self._writer.writerow(asdict(record))
            records.append(record)
        self._stream.flush()
        return records

    def close(self) -> None:
        self._stream.close()


def read_collectives(path: Path) -> list[CollectiveRecord]:
    if not path.is_file():
        return []
    found = []
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            try:
                found.append(
                    CollectiveRecord(
                        int(row["step"]),
                        row["collective"],
                        int(row["ranks"]),
                        int(row["size_bytes"]),
                        int(row["calls"]),
                        float(row["seconds"]),
                        float(row["bus_gb_s"]),
                        float(row["predicted_s"]),
                    )
                )
            except (TypeError, ValueError, KeyError):
                break  # a line that a crash cut short
    return found
