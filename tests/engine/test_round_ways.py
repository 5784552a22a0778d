"""The ways to play parts of a round give what the others give, in fewer launches. Without a GPU Triton's
interpreter plays the kernels."""

import pytest
import torch

from tests.engine.tiny_cuda_engine import DEVICE, SPECS, use_few_programs  # isort: skip
from cumulo.engine.decide.speculation import rounds
from cumulo.kernels.cuda.sampling.greedy_rounds import accept_likeliest
from cumulo.kernels.cuda.sampling.rounds import RoundRows, accept
from cumulo.kernels.cuda.sampling.sample import COLUMNS, POSITION

pytestmark = pytest.mark.long
SPEC = SPECS["dense"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    monkeypatch.setattr(rounds, "_ROUNDS", (2, 1))


def test_greedy_draws_from_parts_are_kept_as_draws_from_logits_are() -> None:
    """With a row that is not there, and a lane whose outputs are not numbers."""
    generator = torch.Generator().manual_seed(0)
    drafts, lanes, parts = 1, 8, 5
    lane_slots = torch.tensor([2, 0, -1, 1], device=DEVICE).repeat_interleave(2).int()
    places = torch.arange(parts, device=DEVICE).repeat(lanes, 1).int() * 3
    best = torch.randn(lanes, parts, generator=generator).to(DEVICE)
    best[1, 2:4] = 9.0  # of equals the first
    best[6, 1] = torch.nan
    best[7, 0] = torch.inf
    drawn = (3 * best.argmax(dim=1)).int()
    drawn[1], drawn[6:] = 6, -1
    token_ids = torch.zeros(lanes + 1, dtype=torch.int32, device=DEVICE)
    token_ids[1] = drawn[0]  # the first row's draft is right
    states = []
    for fused in (False, True):
        starts = torch.tensor([5, 6, 0, 1, 0, 0, 3, 4], dtype=torch.int32, device=DEVICE)
        draws = torch.zeros(lanes, COLUMNS, dtype=torch.int32, device=DEVICE)
        draws[:, POSITION] = starts + 1
        queries = torch.arange(lanes + 1, dtype=torch.int32, device=DEVICE)
        behind, picked = (torch.zeros(lanes, dtype=torch.int32, device=DEVICE) for _ in range(2))
        tokens = torch.zeros(3, 16, dtype=torch.int32, device=DEVICE)
        rows = RoundRows.zeros(4, 6, DEVICE)
        if fused:
            accept_likeliest(
                lane_slots,
                starts,
                queries,
                draws,
                best,
                places,
                picked,
                token_ids,
                behind,
                tokens,
                rows,
                drafts,
            )
            assert picked[[0, 1, 2, 3, 6, 7]].tolist() == drawn[[0, 1, 2, 3, 6, 7]].tolist()
        else:
            for lane in (0, 1, 2, 3, 6, 7):
                tokens[lane_slots[lane], draws[lane, POSITION]] = max(int(drawn[lane]), 0)
            accept(lane_slots, starts, queries, draws, drawn, token_ids, behind, rows, drafts)
        states.append(
            (starts, draws, behind, tokens, rows.slots, rows.starts, rows.kept, rows.one_each, rows.told)
        )
    for fused_state, plain_state in zip(*states, strict=True):
        assert torch.equal(fused_state, plain_state)
    assert states[1][-1][:, 0].tolist()[:2] == [1, 0]
