"""RunLog: every step's figures to log.csv, and to TensorBoard where it is installed. Written by the trainer.

Numbers are written so that reading them gives the same bits: two runs can be compared to the last digit.
"""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cumulo.collectives.decide.measured import CollectiveProfile
from cumulo.ranks.collectives import CollectiveTime
from cumulo.ranks.scheduled import host_seconds


@dataclass(frozen=True, slots=True)
class TrainRecord:
    step: int  # from 1
    tokens: int  # with a loss, in all
    loss: float  # nats per loss token
    balance: float  # experts' balance, 1 when even; 0 without experts
    gradient_norm: float
    learning_rate_share: float
    held_out_loss: float | None
    step_s: float
    tokens_per_s: float  # computed in this step
    mfu: float
    data_stall_s: float
    checkpoint_block_s: float


class RunLog:
    def __init__(self, folder: Path, after_step: int) -> None:
        """Keep what an earlier run wrote up to `after_step`; what came later will be computed again."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.csv"
        self.records = [record for record in read_log(self.path) if record.step <= after_step]
        self._stream = self.path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._stream, [field.name for field in fields(TrainRecord)])
        self._writer.writeheader()
        self._writer.writerows(map(asdict, self.records))
        self._board: Any = _tensorboard(folder / "tensorboard")

    def write(self, record: TrainRecord) -> None:
        self.records.append(record)
        self._writer.writerow(asdict(record))
        self._stream.flush()
        if self._board is not None:
            for name, value in asdict(record).items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, record.step)

    def forget_after(self, step: int) -> None:
        """After a rollback: those steps did not happen."""
        self.records = [record for record in self.records if record.step <= step]
        self._stream.seek(0)
        self._stream.truncate()
        self._writer.writeheader()
        self._writer.writerows(map(asdict, self.records))

    def close(self) -> None:
        self._stream.close()
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[TrainRecord]:
    """The records of a log.csv; a line that was cut short by a crash ends it."""
    records: list[TrainRecord] = []
    if not path.is_file():
        return records
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            try:
                records.append(
                    TrainRecord(
                        **{field.name: _read(field.name, row[field.name]) for field in fields(TrainRecord)}
                    )
                )
            except (TypeError, ValueError, KeyError):
                break
    return records


def _read(name: str, text: str) -> Any:
    if name in ("step", "tokens"):
        return int(text)
    return None if name == "held_out_loss" and text == "" else float(text)


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


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
