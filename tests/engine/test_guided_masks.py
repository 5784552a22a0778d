"""Guided decoding: which tokens a guide allows, also together with other parameters."""

import re

import numpy as np
import pytest
import torch

from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.guides.guided import Guidance
from cumulo.engine.sampling import sampler
from tests.engine.guided_engine import EOS, GUIDANCE, SPECIAL, TOKENIZER, VOCAB, answers, make_engine

pytest.importorskip("llguidance")


# -- the mask -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["[ab]{2}c?", "(the|then|10|true)( the)*", "x(é|€|ab)y"])
def test_the_mask_is_exactly_the_tokens_that_can_still_lead_to_a_match(source):
    """The oracle: of all short byte strings, those that match; a token is right if it begins the rest of one."""
    pieces = ["a", "b", "c", "the", "then", "10", "true", " the", "x", "é", "€", "y"]
    language, texts = set(), {""}
    for _ in range(4):
        texts = {text + piece for text in texts for piece in ["", *pieces]}
    language = {text.encode() for text in texts if re.fullmatch(source, text)}
    prefixes = {word[:end] for word in language for end in range(len(word) + 1)}
    spellings = [TOKENIZER.token_bytes(token) for token in range(SPECIAL)]
    rng = np.random.default_rng(0)
    for _ in range(20):
        matcher, text = Guidance.matcher(GUIDANCE, Guide("regex", source)), b""
        while len(text) < 6:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[
                :VOCAB
            ]
            right = {token for token, spelling in enumerate(spellings) if text + spelling in prefixes}
            if text in language:
                right.add(EOS)
            assert set(np.flatnonzero(bits).tolist()) == right
            token = int(rng.choice(sorted(right)))
            if token == EOS:
                break
            assert matcher.consume_token(token)
            text += spellings[token]


def test_text_that_looks_like_a_special_token_is_not_the_special_token():
    source = r"<\|(mark|end)\|>"
    for seed in range(4):
        params = SamplingParams(
            guide=Guide("regex", source), seed=seed, logit_bias={SPECIAL: 50.0, EOS: 50.0}
        )
        sample = answers({"one": params})["one"].samples[0]
        assert re.fullmatch(source, sample.text)
        assert SPECIAL not in sample.token_ids


def test_masks_unpacked_on_a_device_equal_those_applied_on_a_cpu():
    rng = np.random.default_rng(1)
    bits = rng.integers(-(2**31), 2**31, (3, 5), dtype=np.int64).astype(np.int32)
    logits = torch.from_numpy(rng.standard_normal((4, 139)).astype(np.float32))
    masked = logits.clone()
    sampler.apply_masks(masked, sampler.TokenMasks(np.array([0, 1, 3]), bits))
    allowed = sampler.unpack_bits(torch.from_numpy(bits), 139)
    expected = logits.clone()
    expected[[0, 1, 3]] = expected[[0, 1, 3]].masked_fill(~allowed, -torch.inf)
    assert torch.equal(masked, expected)
    token = 77
    assert allowed[1, token].item() == bool(int(bits[1, token // 32]) >> token % 32 & 1)


def test_a_batch_without_guides_carries_no_masks():
    table = make_engine().runner.table
    slots = np.array([0, 1])
    assert table.draw_batch(slots, np.array([1, 1]), slots, VOCAB).masks is None


# -- together with other parameters -------------------------------------------------------------------------
def test_min_tokens_gives_way_when_the_answer_is_complete():
    params = SamplingParams(guide=Guide("regex", "ab?"), min_tokens=5, max_tokens=9, seed=1)
    sample = answers({"one": params})["one"].samples[0]
    assert (sample.text, sample.finish_reason) == ("ab", "stop"), "as long as it may be, and no longer"


def test_log_probabilities_are_those_of_the_tokens_a_guide_allows():
    params = SamplingParams(guide=Guide("regex", "[abc]"), logprobs=10, seed=1)
    entry = answers({"one": params})["one"].samples[0].logprobs[0]
    assert sorted(token for token, _ in entry.top) == [97, 98, 99]
    assert sum(np.exp(value) for _, value in entry.top) == pytest.approx(1)


def test_a_guide_with_nothing_left_to_say_fails_its_request_only():
    outputs = answers(
        {
            "impossible": SamplingParams(guide=Guide("regex", "[ab]"), logit_bias={97: -np.inf, 98: -np.inf}),
            "possible": SamplingParams(guide=Guide("regex", "[ab]"), logit_bias={97: -np.inf}),
        }
    )
    assert "no token possible" in outputs["impossible"].error
    assert outputs["possible"].text == "b"


def test_an_answer_that_reaches_max_tokens_is_cut_and_says_so():
    sample = answers({"one": SamplingParams(guide=Guide("regex", "a{10}"), max_tokens=4)})["one"].samples[0]
    assert (sample.text, sample.finish_reason) == ("aaaa", "length")
