"""CudaStep: a step on its way through a GPU. CudaRunner makes one for each plan; the engine asks for its result."""

import time
from collections import deque
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import Rounds, StepPlan, StepResult, TokenLogprobs
from cumulo.engine.play.cuda.rounds import HeadRounds, RoundsAhead
from cumulo.engine.play.cuda.step_words import StepShape
from cumulo.engine.play.slot_table import SlotTable
from cumulo.engine.play.verify import StepDraws, take_accepted, take_rounds
from cumulo.engine.sampling.sampler import Drawn


class StepOwner(Protocol):
    """What a step needs of its runner."""

    table: SlotTable
    device: torch.device
    head: HeadRounds | None
    in_flight: "deque[CudaStep]"  # oldest first
    owners: NDArray[np.int64]  # how many sequences each slot has held so far

    def send_back(self, draws: int) -> "tuple[Tensor, torch.cuda.Event | None]":
        """Start the copy of the drawn tokens to the host."""
        ...


class CudaStep:
    """A step on its way. `result` waits for it; until then it only knows what the host has computed itself."""

    def __init__(self, runner: StepOwner, plan: StepPlan) -> None:
        self._runner, self._plan = runner, plan
        self._submitted_s = time.perf_counter()
        self._started = torch.cuda.Event(enable_timing=True) if runner.device.type == "cuda" else None
        if self._started is not None:
            self._started.record()
        self.of_row: dict[int, tuple[int, int]] = {}
        self.turn = self.played_before = 0  # of rounds: the first's number, and how many were launched before
        self.round_shape: StepShape | None = None
        self.ahead: RoundsAhead | None = None  # launched behind it
        self.owners = np.zeros(0, dtype=np.int64)
        self.draws = StepDraws(self.owners, self.owners, self.owners, self.owners)
        self.host_draws: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.drawn: Drawn | None = None
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.pooled: list[NDArray[np.float64]] = []
        self.failed: Exception | None = None
        self._result: StepResult | None = None
        self._ended: torch.cuda.Event | None = None

    def end(self) -> None:
        """Everything has been launched: from here on only time has to pass."""
        if self.failed is None:
            try:
                if self._plan.rounds is not None and self._runner.head is not None:
                    self._ended = self._runner.head.send_back(len(self._plan.slots))
                else:
                    self._target, self._ended = self._runner.send_back(len(self.draws.slots))
            except Exception as error:
                self.failed = error

    def result(self) -> StepResult:
        while self._result is None and self.failed is None:
            self._runner.in_flight[0].arrive()  # steps arrive in order
        if self.failed is not None:
            self.arrive()
            raise self.failed
        assert self._result is not None
        return self._result

    def arrive(self) -> None:
        """Wait for the tokens, enter them into the host's table, and make the result of them."""
        pending = self._runner.in_flight
        if pending and pending[0] is self:
            pending.popleft()
        if self.failed is not None or self._result is not None:
            return
        try:
            if self._ended is not None:
                self._ended.synchronize()
            finished_s = time.perf_counter()
            if self._plan.rounds is not None:
                self._result = self._rounds_result(self._plan.rounds, finished_s)
                return
            tokens = self._target[: len(self.draws.slots)].numpy().astype(np.int64)
        except Exception as error:  # a kernel failed: this is the first the host hears of it
            self.failed = error
            return
        result = self._new_result(finished_s)
        logprobs, errors = dict[int, TokenLogprobs](), dict[int, str]()
        if self.drawn is not None:
            tokens[self.host_draws] = self.drawn.tokens
            places = self.host_draws.tolist()
            logprobs = {places[index]: entry for index, entry in self.drawn.logprobs.items()}
            errors = {places[index]: error for index, error in self.drawn.errors.items()}
        for draw_index in np.flatnonzero(tokens < 0).tolist():
            errors[draw_index] = "the model returned NaN or infinite logits"
        tokens = np.maximum(tokens, 0)
        table, slots, positions = self._runner.table, self.draws.slots, self.draws.positions
        if self._plan.drafts:  # nothing was planned behind this step: every slot is whose it was
            take_accepted(self._plan, self.draws, Drawn(tokens, logprobs, errors), table, result)
        else:
            # A slot may have been given to another sequence since: a late token must not land in its text.
            still = self.owners == self._runner.owners[slots]
            table.tokens[slots[still], positions[still]] = tokens[still]
            result.tokens, result.logprobs, result.errors = tokens.tolist(), logprobs, errors
        result.prompt_logprobs, result.pooled = self.prompt_logprobs, self.pooled
        self._result = result

    def _rounds_result(self, rounds: Rounds, finished_s: float) -> StepResult:
        head, result = self._runner.head, self._new_result(finished_s)
        assert head is not None
        told = head.told(len(self._plan.slots), rounds, self.turn)
        if self.ahead is not None:
            self.ahead.starts = (np.array(self._plan.starts) + (told[:, :, 0] + 1).sum(axis=1)).tolist()
        take_rounds(self._plan, told, self._runner.table, result)
        if self.played_before:  # since it was submitted, the device has played the others only
            share = rounds.times / (rounds.times - self.played_before)
            result.started_s = finished_s - share * (finished_s - result.started_s)
        return result

    def _new_result(self, finished_s: float) -> StepResult:
        elapsed_s = finished_s - self._submitted_s
        if self._started is not None and self._ended is not None:
            elapsed_s = self._started.elapsed_time(self._ended) / 1e3
        return StepResult(tokens=[], started_s=finished_s - elapsed_s, finished_s=finished_s)
