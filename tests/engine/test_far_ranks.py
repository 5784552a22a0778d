"""Ranks on the GPU's kernels that cannot read each other's memory, as on several hosts: they exchange messages, and
say what one rank says. Processes of their own, at addresses of their own."""

from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

from tests.engine.cuda_ranks import Said, answers, play_rank, requests_of, spec_of  # isort: skip
from cumulo.kernels.cuda.sampling.sample import (
    COLUMNS,
    POSITION,
    SEED_LOW,
    SLOT,
    TEMPERATURE,
    SampleBuffers,
    sample,
)
from cumulo.layout.serving import ServingLayout, rank_part
from cumulo.models.play.cuda_slice import FEED_FORWARD, RankSlice, shared_bytes
from cumulo.ranks.device_group import StagedGroup
from cumulo.ranks.peer_memory import MirroredMemory
from cumulo.ranks.rank_group import RankGroup
from cumulo.ranks.start import run_ranks
from tests.engine.tiny_cuda_engine import DEVICE, make_decoder, make_engine, use_few_programs
from tests.thorough import rare

pytestmark = pytest.mark.long


def play_far(rank: int, name: str, layout: ServingLayout, requests: Any, invariant: bool = False) -> Said:
    return play_rank(rank, name, layout, requests, invariant=invariant, backend="gloo")


ROWS, SLOTS = 6, 4


def draws_of_a_step() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a whole vocabulary, and draws: greedy, at temperatures, and one that only fills the step up."""
    logits = torch.randn((ROWS, 54), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    draws = torch.zeros((ROWS, COLUMNS), dtype=torch.int32)
    draws[:, SLOT] = torch.tensor([0, 1, 2, 3, 0, -1])
    draws[:, POSITION] = torch.tensor([2, 0, 1, 3, 1, 0])
    draws[:, SEED_LOW] = torch.arange(ROWS)
    draws[:, TEMPERATURE] = torch.tensor([0.0, 1.0, 1.0, 1.5, 2.0, 1.0]).view(torch.int32)
    return logits, draws.to(DEVICE)


def draw_far(rank: int) -> tuple[list[int], list[list[int]], list[float]]:
    part = rank_part(spec_of("dense", ServingLayout(tp=2)), ServingLayout(tp=2), rank)
    group = RankGroup(_get_default_store(), "far", (0, 1), rank, 60.0, host=f"127.0.0.{rank + 2}")
    size = shared_bytes(part.local, 16, ROWS, torch.float32, 2, False)
    memory = MirroredMemory(size, StagedGroup(group, DEVICE), DEVICE)
    own = RankSlice(memory, part, 16, ROWS, torch.float32, False)
    logits, draws = draws_of_a_step()
    own.logits.copy_(logits[:, part.vocabulary.start : part.vocabulary.stop])
    picked = torch.full((ROWS,), -7, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((SLOTS, 5), 99, dtype=torch.int32, device=DEVICE)
    own.draw(ROWS, draws, picked, tokens)
    stream = torch.ones((3, part.whole.hidden), device=DEVICE)
    own.partial(FEED_FORWARD, 3).fill_(10.0 * (rank + 1))
    own.add_partials(FEED_FORWARD, stream)
    return picked.tolist(), tokens.tolist(), stream.unique().tolist()


def test_a_token_is_drawn_by_the_rank_that_has_its_logits_and_known_to_all() -> None:
    logits, draws = draws_of_a_step()
    picked = torch.full((ROWS,), -7, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((SLOTS, 5), 99, dtype=torch.int32, device=DEVICE)
    sample(logits, draws, SampleBuffers(ROWS, 54, DEVICE), picked, tokens)
    assert min(picked.tolist()) < 27 <= max(picked.tolist())  # both ranks own some
    expected = picked.tolist(), tokens.tolist(), [31.0]
    assert run_ranks(draw_far, 2, timeout_s=600) == [expected, expected]


@pytest.mark.parametrize(
    ("name", "layout"),
    rare(
        ("dense", ServingLayout(tp=2)),
        ("experts", ServingLayout(tp=2, ep=2)),
        ("dense", ServingLayout(pp=2)),
        ("experts", ServingLayout(dp=2, ep=2)),
        ("window", ServingLayout(tp=2, pp=2)),
        ("latent experts", ServingLayout(tp=2, dp=2, ep=4)),
    ),
    ids=str,
)
def test_gpu_ranks_of_several_hosts_draw_the_tokens_of_one_rank(
    name: str, layout: ServingLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_few_programs(monkeypatch)
    spec = spec_of(name, layout)
    requests = requests_of(4, spec.vocab_size)
    expected = answers(make_engine(make_decoder(spec), True), requests)
    found = run_ranks(play_far, layout.world, name, layout, requests, timeout_s=600)[0]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.thorough
def test_in_the_batch_invariant_mode_messages_give_the_bits_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_few_programs(monkeypatch)
    layout = ServingLayout(tp=2, ep=2)
    spec = spec_of("experts", layout)
    requests = requests_of(4, spec.vocab_size)
    expected = answers(make_engine(make_decoder(spec), True, invariant=True), requests)
    assert run_ranks(play_far, 2, "experts", layout, requests, True, timeout_s=600)[0] == expected
