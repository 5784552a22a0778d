"""What a fleet's router believes of an engine, without a process."""

from typing import Any

from cumulo.serve.engine_link.messages import Stats, StepRecord
from cumulo.serve.replicas.replica import FleetReplica

CLIENT: Any = None  # which is not asked here


def hear(replica: FleetReplica, *took_s: float, prefill_tokens: int = 0) -> None:
    records = [StepRecord(1, 10.0, 10.0 + one, prefill_tokens, 4, 4) for one in took_s]
    replica.hear(Stats(1, 1, 1, 0, 0, 8, 0, 0, records=records), 10.0)


def test_a_slow_moment_of_an_engine_is_not_what_its_steps_take() -> None:
    replica = FleetReplica("r0", CLIENT)
    assert replica.step_s is None
    hear(replica, 5.0, prefill_tokens=100)  # such a step says nothing of those that only decode
    assert replica.step_s is None
    hear(replica, 0.01, 2.0, 0.01)
    assert 0.009 < (replica.step_s or 0.0) < 0.011
    hear(replica, *[0.04] * 12)  # a while that it stays slow
    assert 0.039 < (replica.step_s or 0.0) < 0.041
