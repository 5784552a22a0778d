"""Copies in memory: every node's is kept by another, the loss of one loses nothing, any layout finds its parts."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cumulo.checkpoint.decide.memory_plan import MemoryFile, fetches, file_of, freshest, keepers, overlap
from cumulo.checkpoint.play.held import held_whole, own_parts
from cumulo.checkpoint.play.memory import MemoryStore, memory_folder
from cumulo.errors import TrainingError
from cumulo.layout.layout import Layout
from cumulo.layout.pieces import Box
from cumulo.ranks.groups import control_group
from cumulo.ranks.team import Team
from tests.train.pool import run_ranks
from tests.train.test_resume import DENSE, MOE, assert_same, rank_state, whole_state


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_every_rank_is_kept_by_one_on_another_node(sizes: list[int]) -> None:
    nodes = [f"n{node}" for node, size in enumerate(sizes) for _ in range(size)]
    found = keepers(nodes)
    assert all(keeper is not None and nodes[keeper] != nodes[rank] for rank, keeper in enumerate(found))
    for lost in set(nodes):  # whichever node dies, each rank's file is still somewhere
        for rank, keeper in enumerate(found):
            assert keeper is not None
            assert nodes[rank] != lost or nodes[keeper] != lost
    assert keepers(["one"] * 3) == (None, None, None)


def test_the_freshest_state_is_the_latest_that_is_whole() -> None:
    def of(step: int, *ranks: int) -> frozenset[MemoryFile]:
        return frozenset(MemoryFile(step, 3, rank) for rank in ranks)

    assert freshest([of(5, 0, 1), of(5, 2) | of(6, 1, 2)]) == tuple(
        MemoryFile(5, 3, rank) for rank in range(3)
    )
    assert freshest([of(5, 0, 1), of(6, 1)]) == ()
    assert file_of(MemoryFile(12, 8, 3).name) == MemoryFile(12, 8, 3)
    for name in ("step-1.safetensors", "step-000000012.rank-00003-of-00008.part", "other"):
        assert file_of(name) is None


def test_a_node_fetches_what_it_lacks_once() -> None:
    nodes = ["a", "a", "b", "b"]
    files = [MemoryFile(1, 2, 0), MemoryFile(1, 2, 1)]
    have = [frozenset(files), frozenset(files), frozenset[MemoryFile](), frozenset[MemoryFile]()]
    need = [frozenset(files), frozenset(files), frozenset(files[:1]), frozenset(files[:1])]
    (fetch,) = fetches(nodes, have, need)
    assert (fetch.file, fetch.source, fetch.target) == (files[0], 0, 2)


boxes = st.tuples(*[st.tuples(st.integers(0, 3), st.integers(1, 4)) for _ in range(2)])


@given(boxes, boxes)
def test_an_overlap_is_where_both_are(
    one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]
) -> None:
    a, b = (
        Box(tuple(first for first, _ in box), tuple(size for _, size in box), (0, 0)) for box in (one, other)
    )
    marks = np.zeros((8, 8), dtype=int)
    for box in (a, b):
        marks[box.whole_slices] += 1
    found = overlap(a, b)
    expected = {cell for cell in itertools.product(range(8), range(8)) if marks[cell] == 2}
    if found is None:
        assert not expected
        return
    own = np.zeros((8, 8), dtype=int)
    own[found.whole_slices] = 1
    assert set(zip(*map(list, own.nonzero()), strict=True)) == expected
    inside = np.zeros((8, 8), dtype=int)
    inside[a.whole_slices][found.held_slices] = 1
    assert (inside == own).all()


def test_one_process_goes_on_from_memory_and_refuses_another_model(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path / "node", Team())
    assert store.latest() is None
    whole = whole_state(DENSE)
    for step in (3, 4):
        store.write(step, own_parts(held_whole(whole), 0), {"samples": step})
    assert len(list((tmp_path / "node").iterdir())) == 1  # memory is dear: the older one is gone
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.facts["samples"]) == (4, 4)
    loaded = held_whole({name: torch.zeros_like(tensor) for name, tensor in whole.items()})
    store.load(latest, loaded)
    assert_same(loaded, held_whole(whole))
    with pytest.raises(TrainingError, match="step 4 in memory cannot be used"):
        store.load(latest, held_whole({"model.other": torch.zeros(3)}))
    store.remove()
    assert not (tmp_path / "node").exists()


def _on_nodes(rank: int, root: Path, layout: Layout, experts: bool, load: bool) -> str:
    """Two ranks to a node; a folder each is what another machine's memory would be."""
    spec = MOE if experts else DENSE
    node = f"node-{rank // 2}"
    store = MemoryStore(root / node, Team(control_group()), node)
    whole = whole_state(spec)
    if not load:
        store.write(7, own_parts(rank_state(spec, layout, rank, whole), rank), {"samples": 70})
        return node
    latest = store.latest()
    assert latest is not None
    assert latest.facts == {"step": 7, "samples": 70}
    state = rank_state(spec, layout, rank, None)
    store.load(latest, state)
    assert_same(state, rank_state(spec, layout, rank, whole))
    return node


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after", "experts"),
    [
        (Layout(dp=2, tp=2, zero=1), Layout(dp=2, tp=2, zero=1), False),
        (Layout(dp=4, zero=3), Layout(pp=2), False),
        (Layout(dp=2, pp=2, ep=2), Layout(tp=4), True),
    ],
    ids=str,
)
def test_what_a_lost_node_had_comes_from_its_keeper_under_any_layout(
    before: Layout, after: Layout, experts: bool, tmp_path: Path
) -> None:
    run_ranks(_on_nodes, before.world, tmp_path, before, experts, False)
    written = {path.name for path in tmp_path.glob("node-*/*")}
    shutil.rmtree(tmp_path / "node-1")
    kept = {path.name for path in (tmp_path / "node-0").iterdir()}
    assert kept == written  # of all ranks: its own, and those it keeps for the other node
    run_ranks(_on_nodes, after.world, tmp_path, after, experts, True)  # every rank compares what it loaded


def test_runs_and_nodes_have_memory_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUMULO_NODE", "left")
    left = memory_folder(tmp_path, tmp_path / "runs/a")
    assert left.name == "left"
    monkeypatch.setenv("CUMULO_NODE", "right")
    assert memory_folder(tmp_path, tmp_path / "runs/a") == left.with_name("right")
    assert memory_folder(tmp_path, tmp_path / "runs/b").parent != left.parent
