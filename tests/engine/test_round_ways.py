"""The ways to play parts of a round give what the others give, in fewer launches. Without a GPU Triton's
interpreter plays the kernels."""

from dataclasses import replace

import pytest
import torch

from tests.engine.tiny_cuda_engine import DEVICE, SPECS, make_decoder, make_engine, use_few_programs  # isort: skip
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.speculation import rounds
from cumulo.engine.play.draft_source import DraftSource, attach_rounds
from cumulo.kernels.cuda.linear.likeliest_linear import TileConfig
from cumulo.kernels.cuda.sampling.greedy_rounds import accept_likeliest
from cumulo.kernels.cuda.sampling.rounds import RoundRows, accept
from cumulo.kernels.cuda.sampling.sample import COLUMNS, POSITION
from cumulo.models.batch import KVCache
from cumulo.models.heads.eagle import eagle_layers
from cumulo.models.play.cuda_decoder import CudaDecoder, StepTensors
from cumulo.models.play.cuda_eagle import RoundWays
from tests.engine.test_rounds_cuda import make_head
from tests.engine.test_runner_cuda import prompt, run
from tests.thorough import rare

pytestmark = pytest.mark.slow
SPEC = SPECS["dense"]
PLAIN, TILES = (
    RoundWays(False, False, False, False),
    RoundWays(True, True, True, True, *[TileConfig(16, 4)] * 2),
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    monkeypatch.setattr(rounds, "_ROUNDS", (2, 1))


def played(ways: RoundWays, decoder, temperature: float, monkeypatch):
    """The answer, and behind every round: whether it had no logits, the known tokens and three drafts."""
    engine = make_engine(decoder, on_kernels=True, speculate="rounds")
    attach_rounds(DraftSource("head", SPEC, head=make_head()), engine.runner, 0)
    head = engine.runner.head
    head.head.ways = ways
    engine.scheduler.speculation.fixed_count = 3
    left: list[tuple[bool, list[int]]] = []
    launch = engine.runner.launches.launch

    def noting(shape, every_row: bool = False) -> None:
        launch(shape, every_row)
        if shape.rounds is not None:
            slot, start = int(head.rows.slots[0]), int(head.rows.starts[0])
            left.append((shape.greedy, engine.runner.slots.tokens[slot, : start + 4].tolist()))

    monkeypatch.setattr(engine.runner.launches, "launch", noting)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=3, ignore_eos=True)
    answers = run(engine, [(prompt(6, 1), params)])
    assert engine.scheduler.problems() == []
    return answers, left


@pytest.mark.parametrize("temperature", [0.0, *rare(0.9)])
def test_every_way_to_play_a_round_gives_the_same_tokens_and_drafts(temperature: float, monkeypatch) -> None:
    decoder = make_decoder(SPEC)
    expected, plain = played(PLAIN, decoder, temperature, monkeypatch)
    found, left = played(TILES, decoder, temperature, monkeypatch)
    assert found == expected and len(left) == len(plain) > 1
    for (greedy, text), (_, plain_text) in zip(left, plain, strict=True):
        assert greedy == (temperature == 0)  # sampled draws need their logits
        assert text == plain_text


def test_layers_write_what_a_head_sees_where_it_reads_it() -> None:
    """... and nothing later writes there; logits are the same."""
    spec = replace(SPEC, layers=8)
    found = []
    for in_place in (False, True):
        model = CudaDecoder(make_decoder(spec), 4, 4)
        model.tap(eagle_layers(8))
        model.taps_in_place = in_place
        assert (model._tapped_behind(3, 4) is not None) == in_place and model._tapped_behind(0, 4) is None
        assert model._tapped_behind(3, 9) is None
        cache = KVCache(spec, 2, 16, torch.float32, DEVICE)
        plan = model.attention_plan(4, 4, True, cache, 2, None)
        place = torch.arange(4, dtype=torch.int32, device=DEVICE)
        tables = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
        plan.prepare(torch.arange(5, dtype=torch.int32, device=DEVICE), place + 1, tables)
        logits = model.forward(StepTensors(place + 9, place, place, place, plan), cache)
        found.append((logits.clone(), model.tapped.clone()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    parts = found[1][1].view(4, 3, spec.hidden)
    assert parts.abs().sum(dim=(0, 2)).min() > 0 and not torch.equal(parts[:, 0], parts[:, 1])


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
