"""RankedRunner: plays plans on several ranks. Rank 0 computes in this process, the others in processes of their
own, and every rank plays every plan in the same order. The engine submits to it as to any runner.

A plan carries no sampled token, so it is sent on at once: it waits at the ranks before the step before it has been
drawn. Which runner rank 0 has, and the others too, is `RankSetup`'s matter: this file knows only plans.
"""

import pickle
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from cumulo.engine.decide.plan import PendingStep, StepPlan, StepResult
from cumulo.engine.play.player import DeviceRunner
from cumulo.engine.play.runner_torch import TorchRunner
from cumulo.engine.play.swap_pool import SwapPool
from cumulo.engine.play.transfer_wire import RankCaches
from cumulo.errors import ModelError, RanksFailed, StoppedTogether
from cumulo.models.adapters.files import AdapterWeights
from cumulo.ranks.plan_pipe import PlanWriter
from cumulo.ranks.rank_meter import PID, READ, STEPS, WAITS, RankMeter, RankState, RankTable, rank_states
from cumulo.ranks.start import RankProcesses


class AdapterOrder(NamedTuple):
    """Told between plans: every rank puts its part of an adapter into a slot."""

    slot: int
    folder: str
    fingerprint: str  # of what rank 0 has read there


_STATES_S = 0.5  # how old they may be
_LOOK_S = 1e-4
_GRACE_S = 3.0  # after a step has failed, the rank that caused it has this long to be heard of


class RankedRunner:
    def __init__(
        self,
        runner: DeviceRunner,
        ranks: RankProcesses,
        table: RankTable,
        meter: RankMeter,
        timeout_s: float,
        on_gpu: bool = False,
    ) -> None:
        """`ranks` are all but rank 0, whose runner and meter are here; `table` has the progress of all."""
        self.runner, self.ranks, self._table, self.meter = runner, ranks, table, meter
        self._on_gpu, self._states, self._states_s = on_gpu, list[RankState](), 0.0
        self._plans = PlanWriter(ranks.pipes, timeout_s)
        self._timeout_s = timeout_s
        self.waits_since_s: float | None = None  # for the result of a step
        self.stood_still = False
        self._failed: RanksFailed | None = None
        self.lost = False  # a rank died while a kernel here may have waited for it: results are nonsense
        self.closed = threading.Event()
        self.caches: RankCaches | None = None  # of an engine with a role: the KV of every rank

    def submit(self, plan: StepPlan) -> "RankedStep":
        """Send to all ranks, without waiting for any."""
        if self._failed is not None:
            raise self._failed
        try:
            self._plans.send(pickle.dumps(plan, -1))
        except RanksFailed as error:
            raise self.failure(error) from error
        return RankedStep(self.runner.submit(plan), self)

    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Ranks rehearse a shape together when it first comes."""

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """On all ranks: each has read it before it plays a plan that comes after. If one cannot, none serves it."""
        if self._failed is not None:
            raise self._failed
        order = AdapterOrder(slot, str(weights.folder.absolute()), weights.fingerprint)
        try:
            self._plans.send(pickle.dumps(order, -1))
            problems = {rank: problem for rank, problem in self.ranks.answers().items() if problem}
        except RanksFailed as error:
            raise self.failure(error) from error
        if problems:
            raise ModelError("\n".join(f"rank {rank}: {problems[rank]}" for rank in sorted(problems)))
        assert isinstance(self.runner, TorchRunner)
        self.runner.load_adapter(slot, weights)

    def failure(self, error: Exception) -> RanksFailed:
        """Which rank is to blame for a step that failed here. After it the ranks no longer agree on what they
        hold: the engine must end."""
        if self._failed is None:
            found = [str(error)] if isinstance(error, StoppedTogether) else self.ranks.failures(_GRACE_S)
            self._failed = RanksFailed("\n".join(found or [self._behind(error)]))
            self.ranks.end()  # so that what still waits for them here fails now
        return self._failed

    def stands_still(self) -> bool:
        """Whether a step takes longer than a rank may. For GPUs, on which ranks wait without end."""
        since_s = self.waits_since_s
        self.stood_still = since_s is not None and time.monotonic() - since_s > self._timeout_s
        return self.stood_still

    def _behind(self, error: Exception) -> str:
        """Nobody died: whoever has waited for others least often is whom they wait for; or, inside kernels, where
        nobody counts that, whoever has taken the fewest plans."""
        table = self._table.progress
        if self.stood_still:
            rank = 1 + int(table[1:, READ].argmin())
            return f"rank {rank}: the others wait for it; it stood at\n{self.ranks.stack_text(rank)}"
        waits = table[table[:, PID] > 0, WAITS]  # ranks of other hosts count where nobody here can look
        rank = int(waits.argmin())
        if len(waits) < len(table) and waits.min() == waits.max():
            return f"a rank of another host: the ranks here wait for it: {type(error).__name__}: {error}"
        if rank == 0 or waits.min() == waits.max():
            return f"rank 0: {type(error).__name__}: {error}"
        return f"rank {rank}: the others wait for it; it stood at\n{self.ranks.stack_text(rank)}"

    def close(self) -> None:
        """Finish what was submitted, and end the ranks."""
        self.runner.close()
        self.closed.set()
        self.ranks.end(grace_s=_GRACE_S)

    def wait_for_ranks(self) -> None:
        """Until every rank has ended the steps whose results are here. Rank 0's result does not say so: a step in
        which nothing is drawn may end on one rank before the others have written their last layer."""
        steps = self._table.progress[:, STEPS]
        while int(steps.min()) < int(steps[0]):
            if found := self.ranks.failures(0.0):
                raise self.failure(RuntimeError("; ".join(found)))
            time.sleep(_LOOK_S)

    def rank_states(self) -> list[RankState]:
        """What each rank has done, as of half a second ago at most."""
        now_s = time.monotonic()
        if now_s - self._states_s > _STATES_S:
            self._states, self._states_s = rank_states(self._table.progress, self._on_gpu), now_s
        return self._states

    # -- what the ledger asks ---------------------------------------------------------------------------
    def memory_bytes(self) -> dict[str, int]:
        return self.runner.memory_bytes()

    def measure_step(self, tokens: int, draws: int) -> int | None:
        """None: a step of one rank alone would wait for the others."""
        return None

    @property
    def pool(self) -> SwapPool | None:
        return self.runner.pool


class RankedStep:
    """A step on its way."""

    def __init__(self, pending: PendingStep, runner: RankedRunner) -> None:
        self._pending, self._runner = pending, runner

    def result(self) -> StepResult:
        self._runner.waits_since_s = time.monotonic()
        try:
            result = self._pending.result()
        except Exception as error:
            raise self._runner.failure(error) from error
        finally:
            self._runner.waits_since_s = None
        if self._runner.lost:
            raise self._runner.failure(RuntimeError("a rank died in mid-step"))
        self._runner.meter.step(result.finished_s - result.started_s)
        return result
