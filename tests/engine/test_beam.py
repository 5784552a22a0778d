"""Beam search's decisions against transformers' beam search on a tiny random Llama."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.beams import BeamSearch, candidates_per_beam
from tests import peers, thorough

VOCABULARY = 12


@cache
def tiny_llama(seed: int) -> peers.transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    config = peers.transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.6,
    )  # fmt: skip
    return peers.transformers.LlamaForCausalLM(config).eval()


def search(model: peers.transformers.LlamaForCausalLM, prompt: list[int], **options: Any) -> BeamSearch:
    """Drive the decisions with full forward passes."""
    beams = BeamSearch(**options)
    sequences = [list(prompt)]
    while not beams.done:
        with torch.inference_mode():
            logits = model(torch.tensor(sequences)).logits[:, -1].float()
        wanted = candidates_per_beam(beams.width, len(beams.stop_ids))
        top = torch.log_softmax(logits, dim=-1).topk(min(wanted, VOCABULARY))
        step = beams.advance(
            [
                list(zip(tokens, values, strict=True))
                for tokens, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
        )
        if not beams.done:
            sequences = [[*sequences[p], t] for p, t in zip(step.parents, step.tokens, strict=True)]
            assert [s[len(prompt) :] for s in sequences] == [beam.tokens for beam in beams.live]
    return beams


CASES = [
    (width, n, penalty, eos)
    for width, n in ((2, 2), (3, 1), (4, 3))
    for penalty in (1.0, 0.0, 2.0, -0.5)
    for eos in ([3], [3, 7])
]


@pytest.mark.long
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_results_equal_those_of_transformers(case: int) -> None:
    width, n, penalty, eos = CASES[case]
    model = tiny_llama(case % 5)
    prompt = [1, 5, case % VOCABULARY]
    config = peers.transformers.GenerationConfig(
        num_beams=width, num_return_sequences=n, do_sample=False, length_penalty=penalty,
        max_new_tokens=9, eos_token_id=eos, pad_token_id=VOCABULARY,
        bos_token_id=1, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    with torch.inference_mode():
        theirs = model.generate(torch.tensor([prompt]), generation_config=config)
    ours = search(
        model, prompt, width=width, n=n, length_penalty=penalty, stop_ids=eos, max_tokens=9,
    ).best()  # fmt: skip
    assert len(ours) == n
    for row, hypothesis in zip(theirs.sequences.tolist(), ours, strict=True):
        expected = row[len(prompt) :]
        assert hypothesis.tokens == expected[: len(hypothesis.tokens)]
        assert set(expected[len(hypothesis.tokens) :]) <= {VOCABULARY}  # padding
    scores = [hypothesis.score for hypothesis in ours]
    assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)


def test_a_beam_wide_enough_for_every_sequence_finds_the_best_one() -> None:
    model = tiny_llama(1)
    beams = search(model, [1, 2], width=VOCABULARY**2, n=1, max_tokens=3, length_penalty=0.0)
    every = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * 3)
    full = torch.cat((torch.tensor([[1, 2]]).expand(len(every), 2), every), dim=1)
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(full).logits.float(), dim=-1)[:, 1:-1]
    totals = logprobs.gather(2, every[:, :, None]).sum(dim=(1, 2))
    assert beams.best()[0].tokens == every[totals.argmax()].tolist()
    assert beams.best()[0].logprob == pytest.approx(float(totals.max()), abs=1e-4)


def test_a_stop_token_finishes_its_beam_and_the_others_go_on() -> None:
    beams = BeamSearch(width=2, max_tokens=5, stop_ids=[2])
    step = beams.advance([[(1, -0.1), (2, -2.0), (5, -3.0), (6, -4.0)]])
    assert (step.parents, step.tokens) == ([0, 0], [1, 5])
    assert [(h.tokens, h.logprob, h.finish_reason) for h in beams.kept] == [([2], -2.0, "stop")]


def test_an_ending_outside_the_best_width_is_not_kept() -> None:
    beams = BeamSearch(width=2, max_tokens=5, stop_ids=[1])
    step = beams.advance([[(4, -0.5), (5, -1.0), (1, -1.5), (6, -4.0)]])
    assert beams.kept == []
    assert step.tokens == [4, 5]


def test_ties_go_to_the_earlier_beam_and_the_lower_token() -> None:
    beams = BeamSearch(width=2, max_tokens=5)
    assert beams.advance([[(9, -1.0), (4, -1.0), (7, -1.0)]]).tokens == [4, 7]
    step = beams.advance([[(3, -1.0), (8, -1.0)], [(3, -1.0), (2, -1.0)]])
    assert (step.parents, step.tokens) == ([0, 0], [3, 8])


def test_reaching_max_tokens_finishes_the_live_beams_by_length() -> None:
    beams = BeamSearch(width=2, n=2, max_tokens=1, stop_ids=[1])
    beams.advance([[(4, -0.5), (1, -1.0), (6, -4.0), (7, -5.0)]])
    assert beams.done
    assert [(h.tokens, h.finish_reason) for h in beams.best()] == [([4], "length"), ([1], "stop")]


@settings(max_examples=thorough.examples(100), deadline=None)
@given(
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 8),
    penalty=st.sampled_from([-1.0, 0.0, 1.0, 1.5]),
    data=st.data(),
)
def test_every_search_ends_with_sorted_results_and_no_duplicates(
    width: int, max_tokens: int, penalty: float, data: st.DataObject
) -> None:
    beams = BeamSearch(
        width=width,
        n=width,
        max_tokens=max_tokens,
        length_penalty=penalty,
        stop_ids=[0],
    )
    for _ in range(max_tokens):
        logprob = st.floats(-8, -0.01)
        candidates = [
            sorted(
                ((token, data.draw(logprob)) for token in range(candidates_per_beam(width, 1))),
                key=lambda pair: -pair[1],
            )
            for _ in beams.live
        ]
        step = beams.advance(candidates)
        assert len(step.parents) == len(step.tokens) == (0 if beams.done else width)
        assert len(set(zip(step.parents, step.tokens, strict=True))) == len(step.tokens)
        if beams.done:
            break
    assert beams.done
    best = beams.best()
    assert 1 <= len(best) <= width
    assert [h.score for h in best] == sorted((h.score for h in best), reverse=True)
    assert len({tuple(h.tokens) for h in best}) == len(best)
    with pytest.raises(ValueError, match="done"):
        beams.advance([])
