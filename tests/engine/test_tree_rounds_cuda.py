"""Rounds whose drafts are trees: the tokens of a run without drafts, whichever path of a tree is right, and the
tree that the same head grows in torch. Without a GPU Triton's interpreter plays the kernels."""

from itertools import chain

import pytest
import torch

from tests.engine.tiny_cuda_engine import DEVICE, SPECS, make_decoder, make_engine, use_few_programs  # isort: skip
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.core.extension import Flight
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.plan import Rounds, StepPlan, StepResult
from cumulo.engine.decide.speculation import rounds
from cumulo.engine.decide.speculation.rounds import kinds_of_rounds
from cumulo.engine.play.cuda import rounds as cuda_rounds
from cumulo.engine.play.draft_source import DraftSource, attach_rounds
from cumulo.errors import ConfigError, CumuloError
from cumulo.kernels.cuda.sampling.tree_growth import PART, grow
from cumulo.kernels.cuda.sampling.trees import tree_words
from cumulo.train.head.writer import hidden_states
from tests.engine.test_rounds_cuda import SPEC, engine_with_head, make_head, round_policy
from tests.engine.test_runner_cuda import prompt, run
from tests.kernels.cuda.test_trees import grown
from tests.thorough import rare


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_few_programs(monkeypatch)
    monkeypatch.setattr(rounds, "_ROUNDS", (2, 1))  # short answers end in the middle of more


def whisper(monkeypatch: pytest.MonkeyPatch, known: dict[int, list[int]]) -> None:
    """Every tree becomes one of three shapes in turn, whose right path is its last places: what is right of a known
    text whose beginning the slot has, but for every sixth position. The other places say something else."""
    shapes = ([0, 0, 0, 1, 2, 4, 5, 5], [0, 0, 1, 0, 3, 3, 3, 6], [0, 0, 0, 0, 0, 4, 5, 1])
    paths = ((2, 4, 5, 7), (3, 6, 7), (4, 5, 6))
    turn = [0]

    def right(*given) -> None:
        grow(*given)
        if given[-1] is not None:
            return
        rows, tokens, trees = given[4], given[7], given[9]
        for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
            text = known.get(int(tokens[slot, 0])) if slot >= 0 else None
            if text is None:
                continue
            turn[0] += 1
            shape, path = shapes[turn[0] % 3], paths[turn[0] % 3]
            trees[slot, :8] = torch.tensor(tree_words(shape), dtype=torch.int32, device=trees.device)
            tokens[slot, start + 1 : start + 8] = 52
            for depth, place in enumerate(path, 1):
                if start + depth < len(text) and (start + depth) % 6:
                    tokens[slot, start + place] = text[start + depth]

    monkeypatch.setattr(cuda_rounds, "grow", right)


def watch(engine) -> list[int]:
    """How many drafts each round keeps, as they come."""
    kept: list[int] = []
    policy = engine.scheduler.speculation
    learn = policy.after_result

    def noting(plan: StepPlan, flight, result: StepResult, now_s: float) -> None:
        kept.extend(chain(*result.round_hits.values()))
        learn(plan, flight, result, now_s)

    policy.after_result = noting
    return kept


@pytest.mark.long
@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=0),
        *rare(dict(temperature=0.8, seed=5), dict(temperature=0.9, top_k=20, seed=1)),
    ],
)
def test_trees_give_the_tokens_of_a_run_without_drafts(params, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the end of a block too; what is kept moves in the model's cache and in the head's."""
    decoder = make_decoder(SPEC)
    requests = [([9, *prompt(9, 1)], SamplingParams(**params, max_tokens=10, ignore_eos=True))]
    expected = run(make_engine(decoder, on_kernels=False), requests)
    whisper(monkeypatch, {9: [*requests[0][0], *expected["0"][0]]})
    engine = engine_with_head(decoder, 7, levels=2)
    kept = watch(engine)
    assert run(engine, requests) == expected
    assert {0, 1, 3} <= set(kept)
    assert engine.scheduler.problems() == []


@pytest.mark.long
@pytest.mark.parametrize("levels", [3, *rare(2, 4)])
def test_rows_with_trees_share_a_step(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends earlier, one is sampled, and afterwards a third needs the host."""
    decoder = make_decoder(SPEC)
    requests = [
        ([9, *prompt(6, 1)], SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)),
        (
            [10, *prompt(3, 2)],
            SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=6, ignore_eos=True),
        ),
        (
            [11, *prompt(4, 3)],
            SamplingParams(temperature=0, max_tokens=2, repetition_penalty=1.3, logprobs=1),
        ),
    ]
    expected = run(make_engine(decoder, on_kernels=True), requests)
    known = {text[0]: [*text, *expected[str(index)][0]] for index, (text, _) in enumerate(requests)}
    whisper(monkeypatch, known)
    engine = engine_with_head(decoder, 7, levels=levels)
    kept = watch(engine)
    assert run(engine, requests) == expected
    assert len(set(kept)) > 2 and engine.scheduler.problems() == []


@pytest.mark.long
def test_a_head_grows_the_tree_it_grows_in_torch() -> None:
    """Behind what was kept of a first tree."""
    decoder, head = make_decoder(SPEC), make_head().to(DEVICE)
    text = prompt(9, 4)
    engine = engine_with_head(decoder, 7, levels=3)
    engine.add(text, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), request_id="r")
    kept = watch(engine)
    drafts: list[int] = []
    words: list[int] = []
    while engine.has_work:
        done = engine.step().finished
        if kept and not drafts:
            drafts = engine.runner.slots.tokens[0].tolist()
            words = engine.runner.head.trees.of_slots[0].tolist()
    answer = [*text, *done[0].samples[0].token_ids]
    known = next(n for n in range(len(answer), 0, -1) if drafts[:n] == answer[:n])
    assert known > len(text)
    nodes = grown(Behind(decoder, head, drafts[:known], PART), head.token_of.tolist(), 3, 7)[0]
    assert drafts[known : known + 7] == [token for token, _ in nodes]
    assert words[1:8] == tree_words([0, *(parent for _, parent in nodes)])[1:]
    engine.runner.close()


class Behind(dict[tuple[int, ...], torch.Tensor]):
    """The log-probabilities of the head in torch behind each way, on one sequence; of each part of its tokens only
    the largest."""

    def __init__(self, decoder, head, tokens: list[int], part: int) -> None:
        super().__init__()
        head.rotary.serve(128)
        self._decoder, self._head, self._tokens, self._part = decoder, head, tokens, part

    def __missing__(self, way: tuple[int, ...]) -> torch.Tensor:
        decoder, head, known = self._decoder, self._head, len(self._tokens)
        array = torch.tensor([*self._tokens, *way], device=DEVICE)
        seen, _ = hidden_states(decoder, array[None, : known - 1])
        stream = head.fc(seen[0].float())  # places 0 .. known - 2
        keys, values, out, repeat = [], [], stream[0], SPEC.heads // SPEC.kv_heads
        for place in range(known - 1 + len(way)):
            row = stream[place] if place < len(stream) else out
            query, key, value = head.heads(row[None], decoder.embed.rows(array[place + 1 : place + 2]))
            rotation = head.rotary.rotation_at(torch.tensor([place], device=DEVICE))
            keys.append(rotation.apply(key)[0].repeat_interleave(repeat, 0))
            values.append(value[0].repeat_interleave(repeat, 0))
            scores = torch.stack([(rotation.apply(query)[0] * one).sum(-1) for one in keys])
            weights = (scores * SPEC.head_dim**-0.5).softmax(0)
            mixed = sum(w[:, None] * v for w, v in zip(weights, values, strict=True))
            out = head.rest(row[None], mixed.flatten()[None])[0]
        chances = head.logits(out[None])[0].log_softmax(-1)
        largest = torch.full_like(chances, -1e30)
        for first in range(0, len(chances), self._part):
            place = first + int(chances[first : first + self._part].argmax())
            largest[place] = chances[place]
        self[way] = largest
        return largest


def test_a_tree_is_chosen_where_its_rounds_yield_most() -> None:
    """From what rounds of each kind took and how often drafts and levels were right; chains where it costs too
    much, and where nobody has asked for trees."""

    def chosen(tree_s: float, right_in_trees: float, levels: int = 3) -> Rounds | None:
        policy = round_policy(levels)
        learnt = policy._learnt(1)
        for _ in range(4):
            learnt.see(0, 1e-3)
            for _, drafts, depth in kinds_of_rounds(levels):
                learnt.see(drafts, tree_s if depth else 1e-3 * (1 + 0.15 * drafts), depth)
        for known in policy._right:
            known[:] = [60, 100]
        for known in policy._right_in_trees:
            known[:] = [100 * right_in_trees, 100]
        return policy._choose(1)

    assert chosen(1.6e-3, 0.8)[1:] == (7, 3)
    assert chosen(1.6e-3, 0.62)[1:] == (3, 0)  # hardly more often right than one continuation
    assert chosen(2.4e-3, 0.8)[1:] == (3, 0)
    assert chosen(1.6e-3, 0.8, levels=0)[1:] == (3, 0)


def test_what_trees_keep_says_nothing_about_chains() -> None:
    policy = round_policy(3)
    chains = [policy.rate(place) for place in range(3)]
    plan = StepPlan(0, slots=[0], starts=[4], counts=[1], rounds=Rounds(2, 7, 3))
    for _ in range(100):
        policy.after_result(plan, Flight(), StepResult([0], round_hits={0: [3, 1]}), 0.0)
    assert [policy.rate(place) for place in range(3)] == chains
    assert policy.rate(0, 3) > 0.95 and policy.rate(1, 3) == pytest.approx(0.5, abs=0.05)
    assert policy.rate(2, 3) > 0.95  # of the rounds that came so far
    assert policy.expected(7, 3) == pytest.approx(1 + 0.99 * (1 + 0.5 * 2), abs=0.1)


def test_where_trees_cannot_grow_they_are_refused_by_name() -> None:
    with pytest.raises(CumuloError, match="draft_tree must be 2, 3 or 4 levels"):
        EngineConfig(speculate="head", draft_tree=7)
    with pytest.raises(CumuloError, match="draft_tree needs speculate with the folder of an EAGLE-3 head"):
        EngineConfig(speculate="ngram", draft_tree=3)
    with pytest.raises(CumuloError, match="draft_tree needs a GPU"):
        EngineConfig(speculate="head", draft_tree=3).settled("cpu")
    engine = make_engine(make_decoder(SPECS["window"]), on_kernels=True, speculate="rounds", draft_tree=3)
    with pytest.raises(ConfigError, match="draft_tree needs full attention in every layer"):
        attach_rounds(DraftSource("head", SPECS["window"], head=make_head()), engine.runner, 3)
