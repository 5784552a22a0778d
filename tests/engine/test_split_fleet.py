"""Split roles in virtual time: the real decisions, every request answered, and transfers that take their time."""

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.routing import router
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.simulate.engine import simulate
from cumulo.engine.simulate.run import Arrival, DecodeTime, StepTime
from cumulo.engine.simulate.split_fleet import KVLink, SplitDecode, SplitFleet, SplitPrefill
from tests.engine.invariants import problems

TOKEN_S, STEP_S, LAYERS = 1e-4, 2e-3, 4


class LineCost:
    """So much for a step, and so much for each prompt token in it."""

    def time_of(self, plan, shared) -> StepTime:
        return StepTime(0.0, STEP_S + TOKEN_S * sum(count for count in plan.counts if count > 1), 0.0)

    def decode(self, rows: int) -> DecodeTime:
        return DecodeTime(0.0, STEP_S, 0.0, 0.0, 0.0)

    def arrival_s(self, prompt_tokens: int) -> float:
        return 0.0


def _scheduler(blocks: int = 400) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            blocks=blocks, block_size=16, max_context=4096, max_running=16, max_tokens_per_step=512
        )
    )


def _fleet(link_bytes_per_s: float, prefill: int = 1, decode: int = 2, blocks: int = 400) -> SplitFleet:
    return SplitFleet(
        [SplitPrefill(f"prefill-{one}", _scheduler(blocks), LineCost()) for one in range(prefill)],
        [SplitDecode(one, _scheduler(blocks), LineCost(), LAYERS) for one in range(decode)],
        KVLink(link_bytes_per_s, 1000.0, LAYERS),
    )


def _arrivals(count: int, every_s: float, prompt: int = 1000) -> list[Arrival]:
    return [Arrival(every_s * number, prompt, 40) for number in range(count)]


def _longest_itl(runs) -> float:
    return max(time_s for run in runs for time_s in run.itl_s)


def test_every_request_is_answered_and_nothing_is_left_of_its_transfer() -> None:
    fleet = _fleet(1e9, blocks=150)  # about two prompts: both sides run short of blocks
    runs = fleet.serve(_arrivals(40, 0.02), router("least-loaded"))
    assert sum(len(run.served) for run in runs) == 40
    assert all(one.finished for run in runs for one in run.served)
    assert sum(one.scheduler.transfers.landed for one in fleet.decode) > 10
    for engine in (*fleet.prefill, *fleet.decode):
        engine.scheduler.batch.drop_ended()
        assert problems(engine.scheduler) == [] and not engine.scheduler.transferring
        assert engine.scheduler.pool.used_count == 0


def test_long_prompts_delay_no_running_answer_where_roles_are_split() -> None:
    arrivals = _arrivals(20, 0.15)
    together = simulate(arrivals, _scheduler(), LineCost())
    split = _fleet(1e9, decode=1).serve(arrivals, router("least-loaded"))
    assert _longest_itl([together]) > STEP_S + 500 * TOKEN_S
    assert _longest_itl(split) < 2 * STEP_S + 0.001


def test_a_slow_link_delays_first_tokens_by_the_time_of_its_copies() -> None:
    (fast,) = _fleet(1e12, decode=1).serve(_arrivals(1, 1.0), router("least-loaded"))
    (slow,) = _fleet(2e6, decode=1).serve(_arrivals(1, 1.0), router("least-loaded"))
    copy_s = 999 * 1000.0 / 2e6
    assert copy_s * 0.7 < slow.served[0].first_token_s - fast.served[0].first_token_s < copy_s * 1.01


def test_the_same_traffic_gives_the_same_times() -> None:
    arrivals = _arrivals(30, 0.03)
    first, second = (_fleet(1e8).serve(arrivals, router("prefix-aware")) for _ in range(2))
    assert [one.last_token_s for run in first for one in run.served] == [
        one.last_token_s for run in second for one in run.served
    ]
