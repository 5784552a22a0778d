"""A draft head on the GPU: rounds of drafting and verifying in one step give the tokens of a run without drafts,
and the head proposes what the same head proposes in torch. Without a GPU Triton's interpreter plays the kernels."""

from itertools import chain

import pytest
import torch

from tests.engine.tiny_cuda_engine import DEVICE, SPECS, make_decoder, make_engine, use_few_programs  # isort: skip
from cumulo.engine.decide.core.batch import RequestBatch
from cumulo.engine.decide.core.config import SchedulerConfig
from cumulo.engine.decide.core.extension import StepTiming
from cumulo.engine.decide.core.queue import WaitingQueue
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import Rounds, StepPlan
from cumulo.engine.decide.speculation import rounds
from cumulo.engine.decide.speculation.rounds import DRAFTS, RoundPolicy
from cumulo.engine.play.cuda import rounds as cuda_rounds
from cumulo.engine.play.cuda.step_words import StepShape
from cumulo.engine.play.draft_source import DraftSource, attach_rounds
from cumulo.kernels.cuda.sampling.rounds import (
    PART,
    RoundRows,
    accept,
    logit_parts,
    propose,
)
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.play.cuda_eagle import CudaEagle
from cumulo.spec.model import ModelSpec
from cumulo.train.head.writer import hidden_states
from tests.engine.invariants import problems
from tests.engine.test_runner_cuda import prompt, run
from tests.thorough import rare

pytestmark = pytest.mark.long
SPEC = SPECS["dense"]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    monkeypatch.setattr(rounds, "_ROUNDS", (2, 1))  # short answers end in the middle of more


def make_head() -> EagleHead:
    own = ModelSpec(family="llama", vocab_size=SPEC.vocab_size, hidden=SPEC.hidden, layers=1, heads=SPEC.heads,
                    kv_heads=SPEC.kv_heads, head_dim=SPEC.head_dim, ffn_hidden=40, max_context=128)  # fmt: skip
    head = EagleHead(own, 3 * SPEC.hidden, 37)
    generator = torch.Generator().manual_seed(11)
    for parameter in head.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)
    head.token_of = torch.randperm(SPEC.vocab_size, generator=generator)[:37].sort().values
    return head


def engine_with_head(decoder, drafts: int | None = 3, **options):
    engine = make_engine(decoder, on_kernels=True, speculate="rounds", **options)
    attach_rounds(DraftSource("head", SPEC, make_head()), engine.runner)
    engine.scheduler.speculation.fixed_count = drafts
    return engine


def whisper(monkeypatch, known: dict[int, list[int]]) -> None:
    """The head's proposals are replaced by what is right: all tokens of some known text whose beginning the slot
    has, but for every fourth place, so that each number of drafts is kept in some round."""

    def correct(rows, tokens, ahead) -> None:
        for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
            text = known.get(int(tokens[slot, 0])) if slot >= 0 else None
            if text is not None and start + ahead < len(text) and (start + ahead) % 4:
                tokens[slot, start + ahead] = text[start + ahead]

    def right(best, place, token_of, rows, tokens, tables, block_size, ahead, inputs):
        propose(best, place, token_of, rows, tokens, tables, block_size, ahead, inputs)
        correct(rows, tokens, ahead)

    monkeypatch.setattr(cuda_rounds, "propose", right)


def test_rounds_give_the_tokens_of_a_run_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_decoder(SPEC)
    requests = [
        ([9, *prompt(6, 1)], SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)),
        (
            [10, *prompt(3, 2)],
            SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=6, ignore_eos=True),
        ),
        ([11, *prompt(20, 3)], SamplingParams(temperature=0, max_tokens=3)),
    ]
    expected = run(make_engine(decoder, on_kernels=False), requests)
    known = {text[0]: [*text, *expected[str(index)][0]] for index, (text, _) in enumerate(requests)}
    whisper(monkeypatch, known)
    engine = engine_with_head(decoder)
    kept: list[int] = []
    policy = engine.scheduler.speculation
    learn = policy.after_result
    monkeypatch.setattr(
        policy,
        "after_result",
        lambda plan, flight, result, now_s: (
            kept.extend(chain(*result.round_hits.values())) or learn(plan, flight, result, now_s)
        ),
    )
    assert run(engine, requests) == expected
    assert {0, 1, 2, 3} <= set(kept)  # some rounds kept no draft, some all of them
    assert problems(engine.scheduler) == []


@pytest.mark.long
@pytest.mark.parametrize("drafts", [2, *rare(1, 4, 7)])
def test_rounds_go_on_over_the_ends_of_blocks(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is given ahead is in the table when a later step comes to it."""
    decoder = make_decoder(SPEC)
    requests = [([9, *prompt(6, 1)], SamplingParams(temperature=0, max_tokens=28, ignore_eos=True))]
    expected = run(make_engine(decoder, on_kernels=False), requests)
    whisper(monkeypatch, {9: [*requests[0][0], *expected["0"][0]]})
    assert run(engine_with_head(decoder, drafts), requests) == expected


@pytest.mark.parametrize("arrives", ["afterwards", *rare("meanwhile")])
def test_rounds_that_run_ahead_are_the_first_of_the_next_step(
    arrives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and are forgotten where another step comes first: when an answer has ended at a token that nobody could
    foresee, and when a request arrives. In a small cache, so that blocks change hands."""
    monkeypatch.setattr(rounds, "_AHEAD", 1)
    decoder = make_decoder(SPEC)
    first = ([9, *prompt(6, 1)], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    later = ([10, *prompt(3, 2)], SamplingParams(temperature=0.8, seed=5, max_tokens=2, ignore_eos=True))
    plain = run(make_engine(decoder, on_kernels=False), [first, later])
    whisper(monkeypatch, {9: [*first[0], *plain["0"][0]], 10: [*later[0], *plain["1"][0]]})
    end = max(plain["0"][0], key=plain["0"][0].index)  # the token that comes last for the first time
    answer = plain["0"][0][: plain["0"][0].index(end) + 1]
    engine = engine_with_head(decoder, blocks=4)
    taken: list[bool] = []
    are_first_of = cuda_rounds.RoundsAhead.are_first_of

    def noting(self, plan, shape, owners) -> bool:
        taken.append(are_first_of(self, plan, shape, owners))
        return taken[-1]

    monkeypatch.setattr(cuda_rounds.RoundsAhead, "are_first_of", noting)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(end,))
    engine.add(first[0], params, request_id="first")
    found: dict[str, list[int]] = {}
    asked = False
    while engine.has_work:
        for done in engine.step().finished:
            assert done.error is None, done.error
            found[done.request_id] = done.samples[0].token_ids
        if not asked and (found if arrives == "afterwards" else taken):
            engine.add(*later, request_id="later")
            asked = True
    assert found == {"first": answer, "later": plain["1"][0]}
    assert any(taken) and engine.runner._ahead is None
    assert problems(engine.scheduler) == []
    engine.runner.close()


def test_a_row_that_needs_the_host_ends_the_rounds_of_its_step() -> None:
    """... and answers are the same beside it and after it."""
    decoder = make_decoder(SPEC)
    requests = [
        (prompt(5, 1), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)),
        (prompt(4, 2), SamplingParams(temperature=0, max_tokens=3, repetition_penalty=1.3, logprobs=1)),
    ]
    expected = run(make_engine(decoder, on_kernels=False), requests)
    assert run(engine_with_head(decoder, 2), requests) == expected


@pytest.mark.parametrize("few", [True, False])
def test_the_head_proposes_what_it_proposes_in_torch(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the model's own stream, and behind its own proposals; by the kernels for a few rows and for more."""
    if not few:
        monkeypatch.setattr(CudaEagle, "fits", lambda self, rows: False)
    decoder, head = make_decoder(SPEC), make_head().to(DEVICE)
    text = prompt(9, 4)
    engine = engine_with_head(decoder, 3)
    engine.add(text, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), request_id="r")
    drafts: list[int] = []
    tokens = engine.runner.slots.tokens
    while engine.has_work:
        output = engine.step()
        if engine.scheduler.speculation._right[0][1] > 5.0 and not drafts:  # a round was played
            drafts = tokens[0].tolist()
        done = output.finished
    answer = list(text) + done[0].samples[0].token_ids
    # After one round: the known tokens, then three drafts behind the last one.
    known = next(n for n in range(len(answer), 0, -1) if drafts[:n] == answer[:n])
    assert known >= len(text) + 1
    assert _proposed(decoder, head, drafts[: known + 3], known) == drafts[known : known + 3]


def _proposed(decoder, head, tokens: list[int], known: int) -> list[int]:
    """The head in torch, on one sequence, with an attention matrix: behind the first `known` tokens."""
    head.rotary.serve(128)
    array = torch.tensor(tokens)
    seen, _ = hidden_states(decoder, array[None, : known - 1].to(DEVICE))
    stream = head.fc(seen[0].float())  # places 0 .. known - 2
    found = []
    keys, values, out = [], [], stream[0]
    for place in range(known + 1):
        row = stream[place] if place < len(stream) else out
        behind = decoder.embed.rows(array[place + 1 : place + 2].to(DEVICE))
        query, key, value = head.heads(row[None], behind)
        rotation = head.rotary.rotation_at(torch.tensor([place], device=DEVICE))
        keys.append(rotation.apply(key)[0])
        values.append(value[0])
        repeat = SPEC.heads // SPEC.kv_heads
        scores = torch.stack(
            [(rotation.apply(query)[0] * k.repeat_interleave(repeat, 0)).sum(-1) for k in keys]
        )
        weights = (scores * SPEC.head_dim**-0.5).softmax(0)
        mixed = sum(w[:, None] * v.repeat_interleave(repeat, 0) for w, v in zip(weights, values, strict=True))
        out = head.rest(row[None], mixed.flatten()[None])[0]
        if place >= known - 2:
            found.append(int(head.token_of[head.logits(out[None]).argmax()]))
    return found


def test_accepting_and_proposing_follow_their_references() -> None:
    generator = torch.Generator().manual_seed(0)
    drafts, count = 3, 5
    lane_slots = torch.tensor([2, 0, 4, 1, -1], device=DEVICE).repeat_interleave(4).int()
    lane_starts = (
        torch.tensor([5, 0, 9, 3, 0], device=DEVICE).repeat_interleave(4).int()
        + torch.arange(20, device=DEVICE).int() % 4
    )
    query_starts = torch.arange(21, dtype=torch.int32, device=DEVICE).clamp_max(16)
    picked = torch.randint(0, 2, (20,), generator=generator).int().to(DEVICE)
    token_ids = torch.randint(0, 2, (21,), generator=generator).int().to(DEVICE)
    draws = torch.zeros(20, 9, dtype=torch.int32, device=DEVICE)
    behind = torch.zeros(20, dtype=torch.int32, device=DEVICE)
    rows = RoundRows.zeros(count, 10, DEVICE)
    rows.turns[:] = 3  # there is room for two rounds: it is the second of those
    before = lane_starts.clone()
    accept(lane_slots, lane_starts, query_starts, draws, picked, token_ids, behind, rows, drafts)
    drawn, drafted = picked[:16].view(4, 4), token_ids[:16].view(4, 4)[:, 1:]
    expected = (
        (drawn[:, :-1] == drafted).long().cumprod(dim=1).sum(dim=1).int()
    )  # up to the first that was not
    assert len(set(expected.tolist())) > 2
    assert torch.equal(rows.told[:4, 5], expected) and torch.equal(rows.told[:4, 6:], picked[:16].view(4, 4))
    assert rows.turns.tolist() == [4, 4, 4, 4, 3] and rows.slots.tolist() == [2, 0, 4, 1, -1]
    assert torch.equal(rows.starts[:4], before[:16:4] + expected + 1)
    assert torch.equal(lane_starts[:16], before[:16] + (expected + 1).repeat_interleave(4).int())
    assert rows.kept.tolist() == [*(torch.arange(4) * 4 + expected.cpu()).tolist(), 0]
    assert torch.equal(draws[:16, 1], lane_starts[:16] + 1)
    assert rows.one_each.tolist() == [0, 1, 2, 3, 4, 4]
    logits = torch.randn(count, 4100, generator=generator).to(DEVICE)
    token_of = torch.randperm(5000, generator=generator)[:4100].int().to(DEVICE)
    tokens = torch.zeros(6, 32, dtype=torch.int32, device=DEVICE)
    parts = (count, -(-4100 // PART))
    best, place = torch.zeros(parts, device=DEVICE), torch.zeros(parts, dtype=torch.int32, device=DEVICE)
    logit_parts(logits, best, place)
    propose(best, place, token_of, rows, tokens, tokens, 16, 2, None)
    found = tokens[rows.slots[:4].long(), (rows.starts[:4] + 2).long()]
    assert torch.equal(found, token_of[logits[:4].argmax(dim=-1)])
    assert rows.chain_starts[:4].tolist() == (rows.starts[:4] + 1).tolist()


def round_policy() -> RoundPolicy:
    config = SchedulerConfig(blocks=64, max_context=1000, speculate="rounds")
    return RoundPolicy(RequestBatch(config, WaitingQueue()))


def test_rounds_are_chosen_where_they_pay() -> None:
    """From what steps took and how often drafts were right: long drafts where they are cheap and right, none where
    a round costs more than it yields."""

    def chosen(rate: float, draft_share: float) -> Rounds | None:
        policy = round_policy()
        learnt = policy._learnt(1)
        for _ in range(4):
            learnt.see(0, 1e-3)
            for drafts in DRAFTS:
                learnt.see(drafts, 1e-3 * (1 + draft_share * drafts))
        for known in policy._right:
            known[:] = [rate * 100, 100]
        return policy._choose(1)

    assert chosen(0.9, 0.02).drafts == 7
    assert chosen(0.5, 0.2).drafts == 1
    assert chosen(0.2, 0.3) is None
    policy = round_policy()
    learnt = policy._learnt(1)
    for _ in range(4):
        for drafts, seconds in ((0, 1e-3), (1, 1.2e-3), (3, 1.6e-3)):
            learnt.see(drafts, seconds)
    for known in policy._right:
        known[:] = [60, 100]
    assert policy._choose(1).drafts == 7  # not known yet
    policy = round_policy()
    policy.fixed_count = 16
    assert policy._choose(1) == Rounds(2, 8)  # a runner has room for no more


def test_steps_that_arrive_together_are_not_thought_shorter_than_the_device_took() -> None:

    policy = round_policy()
    ends = [0.0, 1e-3, 4e-3, 4.1e-3, 4.2e-3, 5e-3]  # the host was late for the third
    for index, end_s in enumerate(ends):
        plan = StepPlan(index=index, slots=[0], starts=[index], counts=[1])
        policy.observe(plan, StepTiming(0.8e-3), end_s)
    assert policy._learnt(1).plain[0] == pytest.approx(0.8e-3, rel=0.05)


def test_the_ledger_knows_what_a_head_holds() -> None:
    engine = engine_with_head(make_decoder(SPEC))
    needs = DraftSource("head", SPEC, make_head()).needs(4, on_gpu=True)
    held, cache = engine.runner.launches.head.memory_bytes(), engine.runner.cache
    assert held["draft model"] == needs.weight_bytes
    assert held["draft kv cache"] == cache.blocks * cache.block_size * needs.bytes_per_token
    head, tapped = engine.runner.launches.head.head, engine.runner.model.tapped
    of_tokens = sum(one.nbytes for one in (tapped, head.stream, head.paired, head.qkv))
    assert of_tokens == engine.runner.model.max_tokens * needs.step_token_bytes
    engine.runner.close()


def test_every_shape_of_rounds_is_compiled_before_the_first_request() -> None:
    """Of any number of rows that may share a step; three with seven drafts have a shape of their own."""
    most = StepShape(512, 64, 64)
    warm = cuda_rounds.warm_rounds(most)
    assert len(set(warm)) == len(warm)
    for kind in (Rounds(1, drafts) for drafts in DRAFTS):
        for rows in range(1, rounds.MOST_ROWS + 1):
            assert cuda_rounds.round_shape(rows, kind, most, False) in warm
    assert StepShape(24, 24, 24, True, False, rounds=Rounds(1, 7)) in warm
