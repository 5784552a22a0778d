"""Options of the engine that `cumulo plan serve` weighs: KV blocks in host memory and on disk, and
what drafts."""

from dataclasses import replace

import pytest

from cumulo.cli.shared.plan_options import DraftOptions, ReplicaOptions
from cumulo.engine.simulate.run import Arrival
from cumulo.errors import ConfigError
from cumulo.plan.serve.capacity import Capacity, play
from cumulo.plan.serve.kinds import ReplicaChoices, kinds
from cumulo.plan.serve.options import OptionVerdict, weigh
from cumulo.plan.serve.plan_file import plan_file
from cumulo.plan.serve.replica import Replica
from cumulo.plan.serve.search import ServePlan, Wanted, _together
from cumulo.plan.serve.traffic import Traffic
from cumulo.spec import catalog
from cumulo.spec.slo import Slo
from tests.plan.test_serve_search import replica, some_traffic

DISK = {"kv_disk": "/var/cache/kv", "kv_disk_gib": 400.0}
THROUGH = {"kv_host_gib": 4.0, "disk_bytes_per_s": 10e9}  # four prefixes of 8,192 tokens


def conversations(prefix: int, count: int = 12, rounds: int = 4) -> Traffic:
    """Each asks in turn, so that a KV cache for a few of them holds none when it is asked for."""
    turns = [number for _ in range(rounds) for number in range(count)]
    return Traffic(
        tuple(Arrival(float(i), prefix + 32, 8, ((number, prefix),)) for i, number in enumerate(turns))
    )


def small_cache(**more: object) -> Replica:
    """About 40,000 tokens of KV cache."""
    return replace(replica("rtx-4090"), max_context=9000, **more)


def test_prefixes_come_back_from_disk_when_that_is_sooner_than_computing_them() -> None:
    traffic = conversations(8192).at_rate(0.2)
    plain = play(small_cache(), traffic)
    fast = play(small_cache(**THROUGH | DISK), traffic)
    slow = play(small_cache(**THROUGH | DISK | {"disk_bytes_per_s": 0.02e9}), traffic)
    assert plain.cached_share < 0.05 and fast.cached_share > 0.4
    assert plain.ttft_s is not None and fast.ttft_s is not None and slow.ttft_s is not None
    assert fast.ttft_s.p50 < 0.7 * plain.ttft_s.p50
    # A disk slower than computing is tried until that is known, and then no longer.
    assert slow.cached_share < 0.2 and slow.ttft_s.p50 < 1.05 * plain.ttft_s.p50
    assert fast.finished == slow.finished == plain.requests


def test_a_disk_without_room_for_all_keeps_what_was_used_last() -> None:
    traffic = conversations(8192).at_rate(0.2)
    one = small_cache(**THROUGH | DISK)
    held = replace(
        one, kv_disk_gib=6 * 8192 * one.work().kv_bytes_per_token / 2**30
    )  # half of the conversations
    assert (
        play(held, traffic).cached_share < 0.1
    )  # asked in turn, the least recently used is the one asked for
    assert play(replace(held, kv_disk_gib=2.5 * held.kv_disk_gib), traffic).cached_share > 0.4
    assert held.one_of(4).kv_disk_gib == pytest.approx(held.kv_disk_gib / 4)


def test_sequences_whose_kv_went_to_host_memory_are_not_computed_again() -> None:
    traffic = Traffic(tuple(Arrival(0.01 * number, 300, 900) for number in range(60)))
    plain, kept = play(small_cache(), traffic), play(small_cache(kv_host_gib=16.0), traffic)
    assert plain.preemptions > 5 and plain.recomputed_tokens > 1000
    assert kept.preemptions > 5 and kept.time_by_part["swap"] > 0
    assert kept.recomputed_tokens < 64 * kept.preemptions  # what fills no block of 64 tokens


# -- the search --------------------------------------------------------------------------------------------------
def planned(
    traffic: Traffic, slo: Slo, rate: float, kind: int = 0, **asked: object
) -> tuple[ServePlan, dict[str, OptionVerdict]]:
    wanted = Wanted(catalog.model("llama-3.1-8b"), traffic, rate, slo)
    choices = ReplicaChoices(("rtx-4090",), ("bfloat16",), split=False, **asked)  # type: ignore[arg-type]
    every = tuple(kinds(wanted.spec, traffic, slo, catalog.shipped(), choices))
    best = _together(every[kind], wanted, float("inf"))
    assert best is not None
    plan = ServePlan((best,), (best.report,) * 3, (Capacity(1.0, ()),) * 3, (), every, (best,))
    return plan, {one.option: one for one in weigh(plan, wanted, choices)}


@pytest.mark.long
def test_a_store_is_chosen_where_fewer_replicas_do_with_it() -> None:
    traffic, slo = conversations(8192, rounds=6), Slo(ttft_s=2.0, itl_s=0.5, share=0.7)
    stores = {"kv_host_gib": 64.0}
    without, _ = planned(traffic, slo, 0.8)
    plan, verdicts = planned(traffic, slo, 0.8, **stores)
    assert plan.best.replicas < without.best.replicas
    assert plan.best.replica.kv_host_gib == 64
    host = verdicts["--kv-host-gib 64"]
    assert host.chosen and "would not meet the SLO" in host.why and "hit rate" in host.why
    assert "--kv-host-gib 64" in str(plan.best)


def test_what_is_not_chosen_says_why() -> None:
    slo = Slo(ttft_s=2.0, itl_s=0.1, share=0.9)
    plan, verdicts = planned(some_traffic(40), slo, 1.0, kv_host_gib=8.0, **DISK)
    assert plan.best.replica == plan.best.replica.without_options()
    assert verdicts["--kv-host-gib 8"].why.endswith("no prompts share a prefix and no request is preempted")
    _, verdicts = planned(conversations(8192, 3, 3), slo, 0.1, kv_host_gib=8.0, **DISK)
    assert verdicts["--kv-host-gib 8"].why.endswith("the KV cache holds all prefixes")


def test_a_disk_needs_host_memory_for_a_prefix_to_pass_through() -> None:
    slo = Slo(ttft_s=4.0, itl_s=0.5, share=0.5)
    _, verdicts = planned(conversations(8192, 6, 3), slo, 0.1, disk_bytes_per_s=10e9, **DISK)
    why = verdicts["--kv-disk /var/cache/kv:400"].why
    assert "pass through 16 blocks of host memory, and a prefix has 128: add --kv-host-gib" in why
    _, verdicts = planned(conversations(8192, 6, 3), slo, 0.1, disk_bytes_per_s=0.02e9, **DISK)
    assert "comes from disk in" in verdicts["--kv-disk /var/cache/kv:400"].why


# -- drafts ------------------------------------------------------------------------------------------------------
def speed(one: Replica, requests: int = 1) -> float:
    report = play(one, Traffic(tuple(Arrival(1e-4 * i, 300, 300) for i in range(requests))))
    return report.output_tok_s


def test_looked_up_drafts_pay_where_text_repeats_and_hardly_cost_where_it_does_not() -> None:
    plain = replica()
    gains = {right: speed(replace(plain, acceptance=right)) / speed(plain) for right in (0.2, 0.9, 0.98)}
    assert gains[0.2] > 0.95 and gains[0.9] > 1.5 and gains[0.98] > 1.3 * gains[0.9]


def test_a_heads_drafts_cost_its_time_and_bring_more() -> None:
    plain = replica("h200", "qwen3-0.6b")
    head = replace(plain, acceptance=0.6, speculate="/models/head")
    assert head.head_pass_s > plain.profile.layer_s
    assert speed(head) > 1.2 * speed(plain)
    assert speed(head, 16) == pytest.approx(speed(plain, 16), rel=0.05)  # not in batches


def test_a_plan_names_what_drafts() -> None:
    head = {"acceptance": 0.6, "speculate": "/models/head"}
    slo = Slo(ttft_s=2.0, itl_s=0.1, share=0.9)
    plan, verdicts = planned(some_traffic(12), slo, 0.2, kind=1, **head)
    assert verdicts["speculation"].chosen and not verdicts["no speculation"].chosen
    assert plan_file(plan.best, "llama-3.1-8b", slo).speculate == "/models/head"


def test_nonsense_about_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match="omit --acceptance"):
        ReplicaOptions(drafts=DraftOptions(speculate="")).fields()
