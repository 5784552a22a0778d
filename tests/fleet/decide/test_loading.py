"""Which models are loaded and unloaded: budget, order, and that nobody waits for ever."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.fleet.decide.loading import ModelView, plan_loads

IDLE = ModelView(need_bytes=6, state="unloaded", running=0, used_s=0.0)
LOADED = replace(IDLE, state="loaded")


def test_a_model_that_fits_is_loaded_next_to_the_others() -> None:
    plan = plan_loads({"a": LOADED, "b": replace(IDLE, need_bytes=4)}, ["b"], 10, 0.0)
    assert (plan.load, plan.unload, plan.enter) == (("b",), (), ())


def test_the_least_recently_used_model_makes_way() -> None:
    models = {"a": replace(LOADED, used_s=2.0), "b": replace(LOADED, used_s=1.0), "c": IDLE}
    plan = plan_loads(models, ["c"], 12, 3.0)
    assert (plan.load, plan.unload) == ((), ("b",))  # it is loaded when the other one has left


def test_a_model_with_a_running_request_is_not_unloaded_and_takes_no_further_ones() -> None:
    models = {"a": replace(LOADED, running=1), "b": IDLE}
    plan = plan_loads(models, ["a", "b", "a"], 10, 0.0)
    assert (plan.load, plan.unload, plan.enter) == ((), (), (0,))
    later = plan_loads(models, ["b", "a"], 10, 0.0)
    assert (later.load, later.unload, later.enter) == ((), (), ())


def test_a_model_is_unloaded_after_its_time_unless_somebody_waits_for_it() -> None:
    models = {"a": replace(LOADED, keep_s=5.0)}
    assert plan_loads(models, [], 10, 4.9).unload == ()
    assert plan_loads(models, [], 10, 5.0).unload == ("a",)
    assert plan_loads(models, ["a"], 10, 5.0).enter == (0,)
    assert plan_loads({"a": replace(LOADED, keep_s=5.0, running=1)}, [], 10, 9.0).unload == ()


@settings(max_examples=200, deadline=None)
@given(
    needs=st.lists(st.integers(1, 10), min_size=2, max_size=4),
    asks=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=30),
    arrivals=st.integers(1, 5),
)
def test_every_request_is_served_within_the_budget(
    needs: list[int], asks: list[tuple[int, int]], arrivals: int
) -> None:
    """Loads and unloads take a turn each, requests run for some turns, and more of them keep coming."""
    budget = max(needs)
    models = {str(n): ModelView(need, "unloaded", 0, 0.0) for n, need in enumerate(needs)}
    coming = [(str(model % len(needs)), turns) for model, turns in asks]
    waiting: list[tuple[str, int]] = []
    running: list[tuple[str, int]] = []
    served = 0
    for turn in range(40 * len(asks)):
        waiting += [coming.pop(0) for _ in range(min(arrivals, len(coming)))]
        plan = plan_loads(models, [name for name, _ in waiting], budget, float(turn))
        for name in plan.unload:
            assert not models[name].running
            models[name] = replace(models[name], state="unloading")
        for name in plan.load:
            models[name] = replace(models[name], state="loading")
        entered = [waiting[place] for place in plan.enter]
        assert all(models[name].state == "loaded" for name, _ in entered)
        waiting = [one for place, one in enumerate(waiting) if place not in plan.enter]
        running += entered
        served += len(entered)
        assert sum(one.need_bytes for one in models.values() if one.state != "unloaded") <= budget
        running = [(name, turns - 1) for name, turns in running if turns > 1]
        after = {"unloading": "unloaded", "loading": "loaded"}
        for name, one in models.items():
            count = sum(name == other for other, _ in running)
            models[name] = replace(
                one, state=after.get(one.state, one.state), running=count, used_s=float(turn)
            )  # type: ignore[arg-type]
        if served == len(asks):
            return
    raise AssertionError(f"{len(asks) - served} requests were never served")
