"""FairQueue: the key that used the least compiling time lately goes first; each key's queue is bounded."""

from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.serve.engine_link.guide_checker import FairQueue
from cumulo.serve.engine_link.messages import Submit


def add(queue: FairQueue, tenant: str, source: str) -> bool:
    guide = Guide("regex", source)
    return queue.add(Submit(source, b"", SamplingParams(guide=guide), stream=False, tenant=tenant), guide)


def taken(queue: FairQueue, now_s: float = 0.0) -> str | None:
    waiting = queue.next_job(("quick",), now_s)
    if waiting is None:
        return None
    queue.charge(waiting.tenant, 1.0, now_s)
    return waiting.guide.source


def test_keys_take_turns_however_many_guides_one_of_them_sends() -> None:
    queue = FairQueue()
    for number in range(10):
        add(queue, "flood", f"f{number}")
    for number in range(3):
        add(queue, "calm", f"c{number}")
    assert [taken(queue) for _ in range(7)] == ["f0", "c0", "f1", "c1", "f2", "c2", "f3"]


def test_a_key_that_used_much_time_waits_until_that_is_forgotten() -> None:
    queue = FairQueue()
    queue.charge("heavy", 8.0, 0.0)
    queue.charge("light", 1.0, 0.0)
    for number in range(3):
        add(queue, "heavy", f"h{number}")
        add(queue, "light", f"l{number}")
    assert [taken(queue) for _ in range(3)] == ["l0", "l1", "l2"]
    add(queue, "light", "later")
    assert taken(queue, now_s=0.0) == "later"  # it has used 5 s now, less than 8
    queue.charge("light", 2.0, 100.0)
    add(queue, "light", "last")
    assert taken(queue, now_s=100.0) == "h0"  # 8 s are 0.25 s by now


def test_a_bounded_number_of_different_guides_waits_for_each_key() -> None:
    queue = FairQueue(most_waiting=2)
    assert [add(queue, "a", source) for source in ("x", "y", "z")] == [True, True, False]
    assert add(queue, "a", "x")  # waits for the same compilation
    assert add(queue, "b", "z") and len(queue) == 3


def test_slow_guides_are_a_lane_of_their_own() -> None:
    queue = FairQueue()
    add(queue, "a", "slow")
    add(queue, "a", "quick")
    slow = queue.next_job(("quick",), 0.0)
    assert slow is not None
    queue.add_slow(slow)
    again = queue.next_job(("slow", "quick"), 0.0)
    assert again is slow and again.lane == "slow"
    assert queue.next_job(("slow",), 0.0) is None and taken(queue) == "quick"


def test_keys_without_guides_are_forgotten() -> None:
    queue = FairQueue()
    for number in range(100):
        queue.charge(f"key {number}", 0.01, 0.0)
    queue.charge("recent", 0.01, 1000.0)
    assert list(queue.used) == ["recent"]
