"""What a run writes down: every step's figures in log.csv and TensorBoard, where that is installed, and every
collective's in collectives.csv. Written by the trainer.

Numbers are written so that reading them gives the same bits: two runs can be compared to the last digit.
"""

import csv
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar, get_type_hints

from cumulo.collectives.decide.measured import CollectiveProfile

if TYPE_CHECKING:
    from cumulo.ranks.collectives import CollectiveTime


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


Record = TypeVar("Record", TrainRecord, CollectiveRecord)


def read_records(path: Path, kind: type[Record]) -> list[Record]:
    """The records of a CSV file; a line that was cut short by a crash ends it."""
    found: list[Record] = []
    if not path.is_file():
        return found
    readers = {name: _READERS[hint] for name, hint in get_type_hints(kind).items()}
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            try:
                found.append(kind(**{name: read(row[name]) for name, read in readers.items()}))
            except (TypeError, ValueError, KeyError):
                break
    return found


_READERS: dict[Any, Any] = {
    int: int,
    float: float,
    str: str,
    float | None: lambda text: None if text == "" else float(text),
}


def read_log(path: Path) -> list[TrainRecord]:
    return read_records(path, TrainRecord)


_STARTS = "starts.log"


def note_start(folder: Path, **facts: Any) -> None:
    """Write down that a run's ranks have started, after which `step` and with which steps to repeat; or `why` they
    start again."""
    with (folder / _STARTS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({"time_s": round(time.time(), 3), **facts}) + "\n")


def read_starts(folder: Path) -> list[dict[str, Any]]:
    path = folder / _STARTS
    whole = path.read_text("utf-8").rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


class RecordFile(Generic[Record]):
    """A CSV file of records that grows line by line."""

    def __init__(self, path: Path, kind: type[Record], after_step: int) -> None:
        """Keeps what an earlier run wrote up to `after_step`; what came later will be computed again."""
        self.records: list[Record] = read_records(path, kind)
        self._path, self._names = path, [field.name for field in fields(kind)]
        self._stream = self._begin(after_step)

    def forget_after(self, step: int) -> None:
        """After a rollback: those steps did not happen."""
        self._stream.close()
        self._stream = self._begin(step)

    def _begin(self, step: int) -> TextIO:
        """A file with the steps up to `step`; killed at any moment, one of both files is whole."""
        aside = self._path.with_suffix(".part")
        stream = aside.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(stream, self._names)
        self._writer.writeheader()
        self.records = [record for record in self.records if record.step <= step]
        self._writer.writerows(map(asdict, self.records))
        stream.flush()
        aside.replace(self._path)
        return stream

    def replace_last(self, record: Record) -> None:
        """The line is overwritten before what is left of it goes: killed in between, the step is in the file."""
        self._stream.seek(self._last)
        self.records.pop()
        self.add([record])
        self._stream.truncate()

    def add(self, records: Sequence[Record]) -> None:
        self._last = self._stream.tell()
        self.records += records
        self._writer.writerows(map(asdict, records))
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class RunLog(RecordFile[TrainRecord]):
    def __init__(self, folder: Path, after_step: int, ranks: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        known = read_log(folder / "log.csv")
        super().__init__(folder / "log.csv", TrainRecord, after_step)
        again = known[len(self.records) :]  # a failed start did these steps, and no checkpoint has them
        gpu_s = ranks * sum(record.step_s for record in again)
        note_start(folder, step=after_step, repeated=len(again), repeated_gpu_s=gpu_s)
        self._board: Any = _tensorboard(folder / "tensorboard")

    def write(self, record: TrainRecord) -> None:
        """The step's whole record; it may have been added before its checkpoint was saved."""
        if self.records and self.records[-1].step == record.step:
            self.replace_last(record)
        else:
            self.add([record])
        if self._board is not None:
            for name, value in asdict(record).items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, record.step)

    def close(self) -> None:
        super().close()
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


class CollectiveLog(RecordFile[CollectiveRecord]):
    def __init__(self, folder: Path, after_step: int, profile: CollectiveProfile | None = None) -> None:
        """`profile`: what was measured here predicts better than the cost model."""
        super().__init__(folder / "collectives.csv", CollectiveRecord, after_step)
        self._profile = profile

    def write(self, step: int, times: "Sequence[CollectiveTime]") -> list[CollectiveRecord]:
        from cumulo.ranks.scheduled import host_seconds  # with torch, which readers of logs do without

        records = []
        for one in times:
            known = self._profile.times(one.kind, one.size_bytes, one.ranks) if self._profile else {}
            each_s = min(known.values(), default=host_seconds(one.kind, one.size_bytes, one.ranks))
            gb_s = one.bus_bytes_per_s / 1e9
            found = one.kind, one.ranks, one.size_bytes, one.calls, one.seconds, gb_s, one.calls * each_s
            records.append(CollectiveRecord(step, *found))
        self.add(records)
        return records
