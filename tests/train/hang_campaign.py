"""Stop ranks of a training run at random moments, and hold it against its promise: who hangs is named within 30 s
with the default settings, and a run whose steps take five times as long as others is left alone.

    python -m tests.train.hang_campaign --times 20 --steps 40

Moments are drawn from those at which the run has learnt how long its steps take.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cumulo.train.run.log import read_log, read_starts
from tests import processes
from tests.train.kill import ranks_of

_WITHIN_S = 30.0
_LEARNT = 6  # steps of a start, the first of which does not count
_LEAST_STEP_S, _TIMES = 2.0, 5.0  # of steps whose times vary
_NAMED = re.compile(r"step \d+ has taken more than \S+ s: (ranks? [\d, ]*\d) held it up")


class Run:
    def __init__(self, folder: Path, most_restarts: int) -> None:
        self.folder, self.heard = folder / "run", folder / "heard.txt"
        words = ["train", "examples/train-tiny.yaml", "--folder", str(self.folder), "--steps", "1000000"]
        words += ["--set", f"faults.most_restarts={most_restarts}", "--set", "checkpoint.every_steps=0"]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with self.heard.open("wb") as out:
            self.process: subprocess.Popen[bytes] = processes.start(
                words, stdout=out, stderr=out, env=environment
            )

    def named(self) -> list[str]:
        """Who was said to hang, in order; each is said once by a rank and once by who started it."""
        lines = [" ".join(part.split()) for part in self.heard.read_text("utf-8", "replace").split("error: ")]
        return [found[1] for line in lines[1:] if (found := _NAMED.match(line))]

    def steps(self) -> int:
        return len(read_log(self.folder / "log.csv"))

    def learnt(self) -> bool:
        begun = [note["step"] for note in read_starts(self.folder) if "step" in note]
        return bool(begun) and self.steps() >= begun[-1] + _LEARNT and len(ranks_of(self.process.pid)) == 2

    def wait_for(self, condition: Callable[[], object], what: str, patience_s: float = 600.0) -> None:
        deadline = time.monotonic() + patience_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{what} did not come:\n{self.heard.read_text('utf-8', 'replace')[-3000:]}"
                )
            time.sleep(0.05)

    def hang(self, draw: random.Random) -> tuple[int, str, float]:
        """The rank that was stopped, who was named, and after how many seconds."""
        self.wait_for(self.learnt, "a run that has learnt how long its steps take")
        time.sleep(draw.uniform(0.0, 2.0))
        starts = len(read_starts(self.folder))
        rank, known = draw.choice((0, 1)), len(self.named())
        pid = ranks_of(self.process.pid)[rank]
        os.kill(pid, signal.SIGSTOP)
        begin_s = time.monotonic()
        self.wait_for(lambda: len(self.named()) > known, "the name of the rank that hangs")
        seconds = time.monotonic() - begin_s
        os.kill(pid, signal.SIGKILL)  # torchrun's agent would wait for it for 30 s
        self.wait_for(lambda: len(read_starts(self.folder)) >= starts + 2, "the next start")
        return rank, self.named()[known], seconds

    def varied(self, steps: int, draw: random.Random) -> list[float]:
        """Seconds of steps in which a rank stands still for a while."""
        self.wait_for(self.learnt, "a run that has learnt how long its steps take")
        found, known = list[float](), len(self.named())
        while len(found) < steps and len(self.named()) == known:
            pid, step, begin_s = (
                ranks_of(self.process.pid)[draw.choice((0, 1))],
                self.steps(),
                time.monotonic(),
            )
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(_LEAST_STEP_S, _TIMES * _LEAST_STEP_S))
            os.kill(pid, signal.SIGCONT)
            self.wait_for(lambda step=step: self.steps() > step, "the next step")  # type: ignore[misc]
            found.append(time.monotonic() - begin_s)
        last = self.steps()
        self.wait_for(lambda: self.steps() > last + 60, "steps that are alike again")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--times", type=int, default=20, help="hangs")
    parser.add_argument(
        "--steps", type=int, default=40, help="whose times vary by five times, without a hang"
    )
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory(prefix="cumulo-hangs-", ignore_cleanup_errors=True) as name:
        run = Run(Path(name), most_restarts=asked.times + 3)
        try:
            seconds = run.varied(asked.steps, draw) if asked.steps else []
            alarms = len(run.named())
            if seconds:
                print(
                    f"{len(seconds)} steps of {min(seconds):.1f} to {max(seconds):.1f} s: {alarms} false alarms"
                )
            hangs = []
            for _ in range(asked.times):
                hangs.append(run.hang(draw))
                print("rank {} stopped: {} named after {:.1f} s".format(*hangs[-1]), flush=True)
        finally:
            for pid in ranks_of(run.process.pid).values():
                os.kill(pid, signal.SIGKILL)
            run.process.kill()
            run.process.wait()
    good = [one for rank, who, one in hangs if who == f"rank {rank}" and one <= _WITHIN_S]
    slowest = f", after {max(one for _, _, one in hangs):.1f} s at most" if hangs else ""
    print(f"{len(good)} of {len(hangs)} hangs named within {_WITHIN_S:.0f} s{slowest}")
    sys.exit(0 if len(good) == len(hangs) and not alarms else 1)


if __name__ == "__main__":
    main()
