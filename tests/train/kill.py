"""Kill ranks of a training run at random moments, and hold what it learns against a run that nobody disturbed.

    python -m tests.train.kill --times 20

Float64: the losses must be the same within 1e-9, and the count of loss tokens at every step exactly, so that no
sample was lost or repeated.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cumulo.layout.layout import Layout
from cumulo.train.decide.config import CheckpointConfig, FaultConfig, TrainConfig, config_text
from cumulo.train.run.log import TrainRecord, read_log
from cumulo.train.run.trainer import Trainer
from tests import processes
from tests.train.ranked import tiny, write_texts

_STEPS_BETWEEN = 5


@dataclass(frozen=True)
class Outcome:
    kills: tuple[tuple[int, int], ...]  # (rank, steps that the log had)
    difference: float  # largest relative one of losses
    same_tokens: bool
    seconds: float
    heard: str


def torment(
    folder: Path,
    times: int,
    layout: Layout,
    seed: int = 0,
    memory_every_steps: int = 0,
    timeout_s: float = 1200,
) -> Outcome:
    """Train under `layout` with `times` kills."""
    source = write_texts(folder / "texts.jsonl")
    changes = dict(
        steps=_STEPS_BETWEEN * (times + 1),
        faults=FaultConfig(most_restarts=2 * times),
        checkpoint=CheckpointConfig(
            every_steps=3, keep=2, memory_every_steps=memory_every_steps, memory_folder=str(folder / "memory")
        ),
        evaluate_sequences=0,
    )
    expected = Trainer(tiny(folder / "undisturbed", source, Layout(), **changes)).run().records
    config = tiny(folder / "killed", source, layout, **changes)
    begin = time.monotonic()
    kills, heard = _run(folder, config, times, random.Random(seed), begin + timeout_s)
    found = read_log(folder / "killed/log.csv")
    return Outcome(
        tuple(kills), _difference(found, list(expected)),
        [(r.step, r.tokens) for r in found] == [(r.step, r.tokens) for r in expected],
        time.monotonic() - begin, heard,
    )  # fmt: skip


def _run(
    folder: Path, config: TrainConfig, times: int, drawn: random.Random, deadline: float
) -> tuple[list[tuple[int, int]], str]:
    (folder / "config.yaml").write_text(config_text(config))
    log = Path(config.folder) / "log.csv"
    kills: list[tuple[int, int]] = []
    with (folder / "heard.txt").open("w") as heard:
        run = processes.start(
            ["train", str(folder / "config.yaml")], stdout=heard, stderr=heard,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            while run.poll() is None and time.monotonic() < deadline:
                time.sleep(drawn.uniform(0.05, 0.3))
                step = len(read_log(log))
                if len(kills) < times and step >= _STEPS_BETWEEN * len(kills) + drawn.randint(
                    1, _STEPS_BETWEEN
                ):
                    ranks = ranks_of(run.pid)
                    if len(ranks) == config.layout.world:
                        rank = drawn.choice(sorted(ranks))
                        os.kill(ranks[rank], signal.SIGKILL)
                        kills.append((rank, step))
            if run.poll() is None:
                raise TimeoutError(f"not done in time, after {len(kills)} kills; see {folder}")
        finally:
            if run.poll() is None:
                for pid in ranks_of(run.pid).values():
                    os.kill(pid, signal.SIGKILL)
                run.kill()
                run.wait()
    text = (folder / "heard.txt").read_text()
    if run.returncode:
        raise RuntimeError(f"the run ended with exit code {run.returncode}:\n{text[-4000:]}")
    return kills, text


def ranks_of(launcher: int) -> dict[int, int]:
    """Process ids of a launcher's ranks, from /proc."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != launcher:
                continue
            name = (
                entry / "comm"
            ).read_text()  # of a rank that was forked; its environment in /proc is its parent's
            if name.startswith("rank "):
                found[int(name[5:])] = int(entry.name)
                continue
            for item in (entry / "environ").read_bytes().split(b"\0"):
                if item.startswith(b"RANK="):
                    found[int(item[5:])] = int(entry.name)
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
    return found


def _difference(found: list[TrainRecord], expected: list[TrainRecord]) -> float:
    if len(found) != len(expected):
        return float("inf")
    return max(abs(own.loss - other.loss) / other.loss for own, other in zip(found, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--memory-every", type=int, default=0, help="steps between copies in memory; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    layout = Layout(dp=arguments.dp, tp=arguments.tp, pp=arguments.pp, zero=arguments.zero)
    with tempfile.TemporaryDirectory(prefix="cumulo-kill-") as folder:
        outcome = torment(
            Path(folder), arguments.times, layout, arguments.seed, arguments.memory_every, timeout_s=3600
        )
    print(outcome.heard)
    print(f"layout {layout}: {len(outcome.kills)} kills (rank, at step): {list(outcome.kills)}")
    print(f"largest relative difference of the losses {outcome.difference:.2e}, in {outcome.seconds:.0f} s")
    print(f"every step learnt the same tokens as undisturbed: {outcome.same_tokens}")
    good = len(outcome.kills) == arguments.times and outcome.difference < 1e-9 and outcome.same_tokens
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
