"""RoundPolicy: decides when a device drafts and verifies by itself, several rounds in one step, and how much.

On a GPU a step is shorter than the host's time between two steps, so drafts that wait for the host gain nothing. A
plan with `rounds` leaves both to the device: it verifies what its head has drafted, keeps what agrees, drafts
behind that, and goes on; the host sees the tokens of all rounds at once. While it takes them in, the device plays
the first rounds of the next step (`rounds_ahead`). An extension of the scheduler, in
the place of `Speculation` where the runner has a head on a GPU.

What a round takes is learnt for each number of drafts; how often a draft is right, place by place.
"""

from math import ceil

from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.extension import Extension, Flight, StepTiming
from cumulo.engine.decide.core.request import Sequence
from cumulo.engine.decide.plan import Rounds, StepPlan, StepResult
from cumulo.engine.decide.speculation.accepted import draft_budget

DRAFTS = (1, 3, 7)  # with the known token 2, 4 or 8 places: kernels are made for such numbers
MOST_ROWS = 4  # with more, steps are long, and each number of rows would have to be captured anew
_SEEN = 4  # steps of a kind: the first may have compiled or captured something
_ROUNDS = (4, 2, 1)  # with more, more is drawn behind the end of an answer
MOST_DRAFTS, MOST_ROUNDS = 8, 12  # that a runner has room for
_AHEAD = 1  # rounds behind a step's, which the device plays while the host takes in what was drawn
STEP_S = 10e-3  # a step is no longer for several rounds: newcomers wait for its end
_UNKNOWN_ROUND = 1.5  # times a step without drafts, until it is known
_LEAST_GAIN = 1.03
_TRY_AGAIN = 256  # steps without drafts, after which they are tried again
_NEWS, _ODD_NEWS = 0.1, 0.01  # share of the news in an average; of a step that took far longer
_MEMORY = 0.995
_LIKELY = (3.0, 5.0)  # before anything is known: hits, tries


class _Learnt:
    """What is known of steps with about so many rows."""

    def __init__(self) -> None:
        self.plain = [0.0, 0]  # seconds, steps seen
        self.rounds: dict[int, list[float]] = {}  # by drafts: seconds of a round, steps seen
        self.idle = 0  # steps without drafts since they were last worth it
        self.hopeless = False

    def see(self, drafts: int, seconds: float) -> None:
        known = self.plain if not drafts else self.rounds.setdefault(drafts, [0.0, 0])
        known[1] += 1
        # The first steps of a kind may compile or capture something, or wait for a prompt's result.
        if known[1] == 1 or seconds < 0.6 * known[0]:
            known[0] = seconds
        elif known[1] <= _SEEN:
            known[0] = min(known[0], seconds)
        else:
            known[0] += (_NEWS if seconds < 1.5 * known[0] else _ODD_NEWS) * (seconds - known[0])

    def round_s(self, drafts: int) -> float | None:
        """Seconds of a round, if enough were seen."""
        seconds, steps = self.rounds.get(drafts, (0.0, 0))
        return seconds if steps >= _SEEN else None


class RoundPolicy(Extension):
    def __init__(self, batch: RequestBatch) -> None:
        self._batch = batch
        self._ahead: tuple[int, int, list[int], int] | None = None  # plan, drafts, slots, rounds
        self.max_context = batch.config.max_context
        self._by_rows: dict[int, _Learnt] = {}
        self._right = [list(_LIKELY) for _ in range(MOST_DRAFTS)]  # by place: hits, tries
        # Rows and drafts, index and end of the last step.
        self._before: tuple[tuple[int, int] | None, int, float] | None = None
        self.fixed_count: int | None = None  # drafts of every row, for measurements; None: as many as pay

    @property
    def step_s(self) -> float:
        """How long a step of several rounds may take: less where a shorter ITL is promised."""
        return min(STEP_S, self._batch.longest_step_s)

    # -- what a step brings -----------------------------------------------------------------------------------
    def rate(self, place: int) -> float:
        """How often the draft at a place is right, those before it being right."""
        hits, tries = self._right[place]
        return hits / tries

    def expected(self, drafts: int) -> float:
        """Tokens of a round (Leviathan et al. 2023, eq. 1, with a rate for each place)."""
        tokens = chance = 1.0
        for place in range(drafts):
            chance *= self.rate(place)
            tokens += chance
        return tokens

    def best(self, rows: int) -> tuple[Rounds, float]:
        """The rounds that yield most tokens per second, and how many times as many as steps without."""
        learnt = self._learnt(rows)
        found: tuple[float, Rounds] | None = None
        for drafts in DRAFTS:
            if (round_s := learnt.round_s(drafts)) is None:
                continue
            rate = self.expected(drafts) / round_s
            if found is None or rate > found[0]:
                found = rate, Rounds(self._rounds_within(round_s), drafts)
        assert found is not None
        return found[1], found[0] * learnt.plain[0]

    def _rounds_within(self, round_s: float) -> int:
        return next((count for count in _ROUNDS if count * round_s <= self.step_s), 1)

    def _learnt(self, rows: int) -> _Learnt:
        return self._by_rows.setdefault(1 << (rows - 1).bit_length(), _Learnt())

    def _choose(self, rows: int) -> Rounds | None:
        if self.fixed_count is not None:
            drafts = min(self.fixed_count, MOST_DRAFTS)
            return Rounds(_ROUNDS[0], drafts) if drafts else None
        learnt = self._learnt(rows)
        if rows > MOST_ROWS:
            learnt.hopeless = rows > 2 * MOST_ROWS  # when some have ended, the head can continue
            return None
        if learnt.plain[1] < _SEEN:
            return None
        unknown = next((drafts for drafts in DRAFTS if learnt.round_s(drafts) is None), None)
        if unknown is not None:
            return Rounds(self._rounds_within(_UNKNOWN_ROUND * learnt.plain[0]), unknown)
        chosen, gain = self.best(rows)
        learnt.hopeless = gain < _LEAST_GAIN and learnt.idle < _TRY_AGAIN
        return None if learnt.hopeless else chosen

    # -- the points of a step ---------------------------------------------------------------------------------
    def waits(self, rows: list[Sequence]) -> bool:
        """Whether the next step is to be planned only when the tokens of these rows, in flight, are known."""
        return self._choose(len(rows)) is not None and all(map(_drawn_on_device, rows))

    def plans_ahead(self, in_flight: StepPlan, now_s: float) -> bool:
        return not in_flight.may_accept and not self.waits(self._batch.in_flight[in_flight.index].rows)

    def end_step(self, plan: StepPlan, flight: Flight, now_s: float) -> None:
        """Let a plan of decoding alone, whose tokens are known, go on by itself. Takes no block from anybody."""
        rows, kv = flight.rows, self._batch.kv
        if not rows or len(flight.draws) != len(rows) or len(plan.counts) != plan.tokens:
            return  # prompts are computed
        budget = draft_budget(self._batch, plan, flight)
        chosen = self._choose(len(rows))
        if chosen is None:
            self._learnt(len(rows)).idle += 1
            plan.feeds_head = not self._learnt(len(rows)).hopeless
            return
        count, drafts = chosen
        if len(rows) * drafts > budget or not all(map(_drawn_on_device, rows)):
            return
        if any(start != len(sequence.tokens) - 1 or sequence.shares_tail
               for sequence, start in zip(rows, plan.starts, strict=True)):  # fmt: skip
            return
        wanted = max(sequence.limit - len(sequence.tokens) for sequence in rows)
        needed = ceil(wanted / self.expected(drafts))  # what lies behind the end is wasted
        count = max(1, min(count, needed))
        if self._ahead is not None and self._ahead[:3] == (plan.index - 1, drafts, plan.slots):
            count = max(count, self._ahead[3] + 1)  # those are under way: only a step with more can take them
        ahead = self._rounds_ahead(count, needed, drafts, len(rows))
        for sequence, start in zip(rows, plan.starts, strict=True):
            # Behind the last round's tokens lie the drafts for the next step.
            most = min((count + ahead + 1) * (drafts + 1), self.max_context - 1 - start)
            room = kv.room_ahead(sequence, start, most, len(rows), plan)
            if (count + ahead + 1) * (drafts + 1) > room:
                ahead = 0
            while count and (count + 1) * (drafts + 1) > room:
                count = count // 2
        if not count:
            return
        plan.rounds, plan.rounds_ahead = Rounds(count, drafts), ahead
        self._ahead = (plan.index, drafts, plan.slots[:], ahead) if ahead else None
        self._learnt(len(rows)).idle = 0
        for sequence in rows:
            sequence.request.story.note_drafts(now_s, plan.index, count * drafts, self.rate(0))

    def _rounds_ahead(self, count: int, needed: int, drafts: int, rows: int) -> int:
        """How many rounds the device may play behind a step of `count`, of which the answers need so many. None
        where others than the device write into blocks that an answer has left."""
        if needed <= count or self._batch.kv.written_by_others:
            return 0
        learnt = self._learnt(rows)
        round_s = learnt.rounds.get(drafts, [0.0])[0] or _UNKNOWN_ROUND * learnt.plain[0]
        return min(_AHEAD, needed - count, max(0, int(self.step_s / round_s) - count) if round_s else _AHEAD)

    def observe(self, plan: StepPlan, timing: StepTiming, now_s: float) -> None:
        """A step ended now. What counts is the time since the one before of its kind: it includes the host's, where
        the device waits for it. Never less than the device's own seconds (of one round): where the host was
        late, the results of several steps are there at once."""
        rows, before = len(plan.slots), self._before
        _, drafts = plan.rounds or (1, 0)
        kind = (rows, drafts) if rows and plan.tokens == rows else None
        if kind is not None and before is not None and before[:2] == (kind, plan.index - 1):
            times = 1 if plan.rounds is None else plan.rounds.times
            seconds = max(timing.seconds, now_s - before[2])
            self._learnt(rows).see(drafts, seconds / times)
        self._before = (kind, plan.index, now_s)

    def after_result(self, plan: StepPlan, flight: Flight, result: StepResult, now_s: float) -> None:
        """How many drafts of each round were right."""
        if plan.rounds is None:
            return
        for hits_of_rounds in result.round_hits.values():
            for hits in hits_of_rounds:
                for place in range(min(hits + 1, plan.rounds.drafts)):
                    known = self._right[place]
                    known[0] = _MEMORY * known[0] + (place < hits)
                    known[1] = _MEMORY * known[1] + 1


def _drawn_on_device(sequence: Sequence) -> bool:
    """Draws that need nothing of the host: no guide, penalty, bias or log-probability, no adapter, no beam."""
    request = sequence.request
    params = request.params
    return (
        request.beam is None
        and request.adapter < 0
        and params.guide is None
        and params.logprobs is None
        and params.best_of is None
        and not params.edits_logits
        and sequence.output_length >= params.min_tokens
    )
