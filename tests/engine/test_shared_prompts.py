"""A step's prompt tokens between tenants: the split itself, and what the real scheduler makes of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.request import Request
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import StepPlan, StepResult
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.sharing.step_shares import Want, by_share, shared_step_tokens
from cumulo.engine.decide.sharing.tenants import ABOUT_S, RECENT_HALF_LIFE_S, FairShares, Tenant
from tests import thorough
from tests.engine.invariants import problems


def tenant(name: str, served: int = 0) -> Tenant:
    made = Tenant(name)
    made.computed_tokens = served
    return made


def split(wants: list[Want], bound: int) -> list[int]:
    return by_share(wants, 512, bound, 0.0)


def short(of: Tenant, tokens: int) -> Want:
    return Want(of, tokens, is_one_of_few=True, is_short=True)


def test_a_short_prompt_goes_first_with_several_steps_worth_and_others_still_get_on() -> None:
    heavy, light = tenant("heavy", 3500), tenant("light", 40)
    assert split([Want(heavy, 3500), short(light, 60)], 8) == [2, 32]
    assert split([Want(heavy, 3500), short(light, 20)], 8) == [2, 20]
    assert split([Want(heavy, 3500), short(light, 5)], 8) == [3, 5]
    assert split([short(light, 20)], 8) == [20]


def test_tenants_split_a_step_evenly_and_leave_what_they_do_not_need() -> None:
    wants = [Want(tenant("a", 300), 300), Want(tenant("b", 100), 500), Want(tenant("c", 110), 500)]
    assert split(wants, 31) == [11, 10, 10]
    assert split([Want(tenant("a", 900), 3), *wants[1:]], 31) == [3, 14, 14]


def test_the_shortest_prompt_of_one_who_asks_for_little_gets_most_of_a_step() -> None:
    long, medium, greedy = tenant("long", 1800), tenant("medium", 1300), tenant("greedy", 4000)
    few = Want(medium, 300, is_one_of_few=True)
    assert split([Want(long, 3000), few], 16) == [4, 12]
    assert split([Want(long, 3000), Want(greedy, 300, is_one_of_few=True)], 16) == [8, 8]  # served much more
    assert split([Want(long, 3000), Want(medium, 300)], 16) == [8, 8]  # it has many of them
    assert split([few], 16) == [16]


def test_of_several_short_prompts_the_shortest_goes_first_unless_its_tenant_had_much_more() -> None:
    a, b, c = tenant("a", 1300), tenant("b", 1000), tenant("c", 1200)
    wants = [short(a, 32), short(b, 40), short(c, 9)]
    assert split(wants, 8) == [1, 1, 9]
    c.computed_tokens = 2100
    assert split(wants, 8) == [32, 1, 1]


def test_a_tenant_with_two_short_prompts_has_one_at_a_time() -> None:
    a, b = tenant("a", 100), tenant("b", 100)
    assert split([short(a, 10), short(a, 11), short(b, 30)], 8) == [10, 0, 2]


def test_what_was_served_long_ago_does_not_count() -> None:
    old = tenant("old", 8000)
    assert old.recent(0.0) == 8000
    assert old.recent(RECENT_HALF_LIFE_S) == 4000
    old.computed_tokens += 10
    assert old.recent(20 * RECENT_HALF_LIFE_S) < 11


def test_more_important_prompts_go_before_shares() -> None:
    heavy, light = tenant("heavy", 9000), tenant("light", 10)
    assert split([Want(light, 20, priority=1), Want(heavy, 16, priority=0)], 16) == [0, 16]


@settings(max_examples=thorough.examples(200), deadline=None)
@given(
    served=st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    tokens=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 4000), st.booleans()), min_size=1, max_size=12
    ),
    bound=st.integers(1, 512),
    spare=st.integers(0, 512),
)
def test_a_split_stays_within_its_bounds_and_always_gets_on(
    served: list[int], tokens: list[tuple[int, int, bool]], bound: int, spare: int
) -> None:
    tenants = [tenant(str(number), amount) for number, amount in enumerate(served)]
    wants = [
        Want(tenants[number % len(tenants)], count, few, few and count < 100) for number, count, few in tokens
    ]
    given_tokens = by_share(wants, bound + spare, bound, 0.0)
    assert all(0 <= count <= want.tokens for count, want in zip(given_tokens, wants, strict=True))
    total = sum(given_tokens)
    assert 0 < total <= min(bound + spare, 4 * bound + bound // 4 + len(tenants))
    if not any(want.is_short for want in wants):
        assert total >= min(bound, sum(want.tokens for want in wants))


def test_a_shared_step_is_as_long_as_it_may_be() -> None:
    assert shared_step_tokens(512, 0.04, 2.6e-3) == 15
    assert shared_step_tokens(512, 0.04, 1e-6) == 512  # a fast device: nothing is cut
    assert shared_step_tokens(512, 0.04, 1.0) == 4  # a slow one: not token by token


def test_a_tenant_is_about_until_a_while_after_its_last_request() -> None:
    shares = FairShares()
    ann, bob = shares.tenant("ann"), shares.tenant("bob")
    shares.came(ann, 0.0)
    shares.came(ann, 0.0)
    assert not shares.several_about(0.0) and shares.about() == [ann]
    shares.came(bob, 0.0)
    assert shares.several_about(0.0)
    shares.went(bob, 1.0)
    assert shares.several_about(ABOUT_S) and shares.about() == [ann, bob]
    assert not shares.several_about(2 * ABOUT_S) and shares.about() == [ann]
    shares.came(bob, 2 * ABOUT_S)
    assert shares.several_about(2 * ABOUT_S)


def test_a_tenant_that_was_away_is_owed_nothing_for_that_time() -> None:
    """Otherwise whoever comes newly would have short prompts before those of one that was served while alone."""
    shares = FairShares()
    ann, bob = shares.tenant("ann"), shares.tenant("bob")
    shares.came(ann, 0.0)
    ann.computed_tokens += 1000
    shares.came(bob, 0.0)
    assert bob.recent(0.0) == ann.recent(0.0) == 1000
    shares.went(bob, 0.0)
    ann.computed_tokens += 1000
    shares.came(bob, 1.0)  # after a moment: it was about all the time
    assert bob.recent(1.0) < 1000 < ann.recent(1.0)


# -- the scheduler ------------------------------------------------------------------------------------------
def make() -> Scheduler:
    scheduler = Scheduler(
        SchedulerConfig(
            blocks=2000,
            block_size=16,
            max_context=8192,
            max_running=8,
            max_tokens_per_step=512,
            prefix_cache=False,
        )
    )
    scheduler.costs.prompt_s_per_token = 2.5e-3  # 16 tokens in a shared step
    return scheduler


def ask(scheduler: Scheduler, name: str, tenant_name: str, prompt: int, now_s: float) -> Request:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    made = Request(name, [1] * prompt, params, seed=0, tenant=tenant_name, arrived_s=now_s)
    scheduler.add(made)
    return made


def step(scheduler: Scheduler, now_s: float) -> StepPlan:
    plan = scheduler.plan(now_s)
    assert plan is not None
    scheduler.apply(plan, StepResult(tokens=[7] * len(plan.draw_rows)), now_s)
    assert problems(scheduler) == []
    return plan


def test_a_long_prompt_does_not_keep_another_tenant_waiting() -> None:
    scheduler = make()
    for number in range(5):
        ask(scheduler, f"long-{number}", "heavy", 3500, 0.0)
    assert step(scheduler, 0.0).counts == [32]  # alone: two shared steps' worth, for another key may come
    short = ask(scheduler, "short", "light", 30, 1.0)
    plan = step(scheduler, 1.0)
    assert plan.counts == [4, 30] and short.story.first_token_s == 1.0
    while "short" in scheduler.requests:
        assert step(scheduler, 1.5).tokens <= 17
    # Steps stay short for a while: another one may come at any time.
    assert step(scheduler, 2.0).counts == [16]
    assert step(scheduler, 2.0 + ABOUT_S).counts == [32]
    long = scheduler.requests["long-0"].story
    assert "shared with other keys" in "\n".join(event.describe() for event in long.events)
    assert len(long.events) < 10


def test_a_tenants_further_prompts_wait_behind_its_first_but_not_in_front_of_others() -> None:
    """The heavy tenant's second prompt is first in the queue when the light one's comes."""
    scheduler = make()
    ask(scheduler, "long-0", "heavy", 3500, 0.0)
    ask(scheduler, "long-1", "heavy", 3500, 0.0)
    step(scheduler, 0.0)
    light = ask(scheduler, "light", "light", 30, 1.0)
    step(scheduler, 1.0)
    assert light.story.admitted_s == 1.0
    assert scheduler.requests["long-1"].story.admitted_s is None


def test_without_keys_a_long_prompt_leaves_room_for_a_short_newcomer() -> None:
    scheduler = make()
    ask(scheduler, "long", "", 3500, 0.0)
    step(scheduler, 0.0)
    short = ask(scheduler, "short", "", 30, 1.0)
    assert step(scheduler, 1.0).counts == [482, 30]
    assert short.story.first_token_s == 1.0
    ask(scheduler, "not short", "", 300, 2.0)
    assert step(scheduler, 2.0).counts == [1, 511]
