"""A pipeline's passes in virtual time: cores and cards that are shared bound them."""

import random

import pytest

from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.costs import ChunkCost, Costs
from cumulo.pipeline.simulate.passes import PassCost, PassKey, PassMachine, pass_key, play_passes
from cumulo.pipeline.simulate.timeline import simulate

MANY = PassMachine(cores=1000, copies=1, bytes_per_s=1.0)


def _passes(schedule: PipelineSchedule) -> list[Action]:
    return [action for stage in range(schedule.stages) for action in schedule.compute_order(stage)]


def _costs(schedule: PipelineSchedule, parts: tuple[tuple[float, float], ...]) -> dict[PassKey, PassCost]:
    return {pass_key(action): PassCost(parts) for action in _passes(schedule)}


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "dualpipe-v"])
def test_with_cores_enough_it_is_the_timeline_simulator(name: str) -> None:
    schedule = build(name, 4, 16)
    costs = {
        pass_key(action): PassCost(((2.0 if action.kind is Kind.BACKWARD else 1.0, 0.0),))
        for action in _passes(schedule)
    }
    expected = simulate(schedule, Costs((ChunkCost(),))).makespan_s
    assert play_passes(schedule, costs, MANY, together=False) == pytest.approx(expected)


def test_fewer_cores_than_ranks_bound_a_step_by_its_work() -> None:
    schedule = build("dualpipe-v", 4, 16)
    costs = _costs(schedule, ((1.0, 0.0),))
    work = sum(len(schedule.compute_order(stage)) for stage in range(4))
    for together in (False, True):
        step = play_passes(schedule, costs, PassMachine(1, 2, 1.0), together)
        assert step == pytest.approx(2 * work, rel=1e-6)  # two copies on one core


def test_pairs_at_the_same_time_share_a_card_but_not_connections() -> None:
    schedule = build("dualpipe-v", 2, 8)
    costs = _costs(schedule, ((0.0, 1.0), (0.0, 0.0)))
    apart = play_passes(schedule, costs, MANY, together=False)
    shared = play_passes(schedule, costs, MANY, together=True)
    own = play_passes(schedule, costs, PassMachine(1000, 1, 1.0, each_connection=True), together=True)
    assert shared == pytest.approx(apart, rel=0.05)  # the card was busy anyway
    assert own < 0.85 * apart
    assert play_passes(schedule, costs, PassMachine(1000, 1, 1.0, True, 1.0), together=True) == pytest.approx(
        2 * own
    )


def test_a_pair_ends_with_its_longer_pass() -> None:
    schedule = build("dualpipe-v", 2, 8)
    even = _costs(schedule, ((0.0, 1.0), (0.0, 0.0)))
    draw = random.Random(0)
    uneven = {key: PassCost(((0.0, draw.uniform(0.0, 2.0)), (0.0, 0.0))) for key in even}
    network = PassMachine(1000, 1, 1.0, each_connection=True)

    def saved(costs: dict[PassKey, PassCost]) -> float:
        return 1 - play_passes(schedule, costs, network, True) / play_passes(schedule, costs, network, False)

    assert saved(uneven) < saved(even)
