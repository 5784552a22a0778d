"""Training's collectives by our schedules give what torch.distributed gives."""

import json
from pathlib import Path

import pytest
import torch

from cumulo.collectives.decide.measured import parse_choices
from cumulo.errors import ConfigError
from cumulo.ranks.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    start_all_reduce,
    use_collectives,
)
from cumulo.ranks.groups import world_group
from cumulo.ranks.rank_group import RankGroup, meeting_point
from cumulo.ranks.scheduled import CollectiveChoices
from cumulo.ranks.start import run_ranks


def _all(rank: int) -> list[torch.Tensor]:
    group = world_group()
    own = torch.arange(12, dtype=torch.float64) * (rank + 1)
    whole = torch.zeros(36, dtype=torch.float64)
    part = torch.zeros(4, dtype=torch.float64)
    summed, begun = own.clone(), own.clone()
    all_reduce(summed, group)
    work = start_all_reduce(begun, group)
    if work is not None:
        work.wait()
    all_gather(whole, own, group)
    reduce_scatter(part, own.clone(), group)
    # Rank r sends r + p rows to rank p, and so the first one sends itself nothing.
    sends, receives = [rank + peer for peer in range(3)], [peer + rank for peer in range(3)]
    sent = torch.arange(2.0 * sum(sends)).view(-1, 2) + 100 * rank
    arrived, equal = torch.zeros(sum(receives), 2), torch.zeros(6, dtype=torch.int64)
    all_to_all(arrived, sent, group, receives, sends)
    all_to_all(equal, torch.arange(6) + 10 * rank, group)
    return [summed, begun, whole, part, arrived, equal]


def _both(rank: int) -> list[list[torch.Tensor]]:
    found = []
    messages = CollectiveChoices({"all_to_all": "direct"}, transport="torch")
    named = "all_reduce=tree,all_gather=bruck,reduce_scatter=ring,all_to_all=pairwise"
    for choice in ("", named, "auto", messages):
        use_collectives(choice)
        found.append(_all(rank))
    use_collectives("")
    return found


def test_the_door_gives_the_same_with_our_schedules() -> None:
    for theirs, *ours in run_ranks(_both, 3):
        for mine in ours:
            assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


def _engine_ranks(rank: int, port: int, profile: str) -> list[tuple[str | None, torch.Tensor]]:
    found = []
    for name, text in (("0-1", "all_reduce=ring"), ("0-1 measured", f"profile={profile}")):
        group = RankGroup(meeting_point(port), name, (0, 1), rank, 30.0, collective=text)
        found.append((group._chosen(40), group.sum(torch.full((2, 5), float(rank + 1)))))
    return found


def test_ranks_of_an_engine_add_by_the_schedule_that_was_asked_for_or_measured(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    rows = [
        {"collective": "all_reduce", "algorithm": name, "ranks": 2, "bytes": 40, "pieces": 1, "seconds": s}
        for name, s in (("gloo", 3.0), ("two-shot", 1.0), ("tree", 2.0))
    ]
    profile.write_text(json.dumps({"rows": rows}), "utf-8")
    store = meeting_point()
    for found in run_ranks(_engine_ranks, 2, store.port, str(profile)):
        assert [name for name, _ in found] == ["ring", "two-shot"]
        assert all(torch.equal(total, torch.full((2, 5), 3.0)) for _, total in found)


def test_a_wrong_choice_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="all_reduce cannot be carried out by 'rung'; there are ring"):
        parse_choices("all_reduce=rung")
    with pytest.raises(ConfigError, match="give NAME=ALGORITHM"):
        parse_choices("sum=ring")
