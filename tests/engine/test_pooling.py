"""Embeddings: `transformers`' hidden states, pooled, are the oracle; nothing that happens around one changes it."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.engine.decide.core.pooling import Pooled
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.outputs import normalised, shortened
from cumulo.errors import InvalidRequest
from cumulo.models.decoder import Decoder
from cumulo.models.files.weights import fill_decoder
from cumulo.models.files.weights_safetensors import FolderWeights
from cumulo.models.play.fused import FusedDecoder, why_not
from cumulo.spec.from_huggingface import spec_from_config
from tests import thorough
from tests.engine.pooled_reference import engine_embeddings, reference_embedding
from tests.engine.tiny_engine import VOCAB, make_decoder, make_engine, run
from tests.models import tiny

MEAN, LAST = SamplingParams(pooling="mean"), SamplingParams(pooling="last")
DECODER = make_decoder("dense")


# -- the arithmetic -------------------------------------------------------------------------------------------
def test_the_sums_of_chunks_become_the_normalised_mean() -> None:
    states = np.random.default_rng(0).normal(size=(10, 6))
    mean = Pooled("mean", 10)
    assert not mean.add(0, 4, states[:4].sum(0)) and mean.total is None
    assert mean.add(4, 10, states[4:].sum(0))
    assert mean.total is not None
    expected = states.mean(0) / np.linalg.norm(states.mean(0))
    np.testing.assert_allclose(normalised(mean.total), expected, atol=1e-12)


def test_a_recomputed_text_is_summed_from_its_beginning_again() -> None:
    states = np.random.default_rng(1).normal(size=(8, 3))
    mean = Pooled("mean", 8)
    mean.add(0, 5, states[:5].sum(0))
    mean.add(0, 2, states[:2].sum(0))
    assert mean.add(2, 8, states[2:].sum(0))
    np.testing.assert_allclose(mean.total, states.sum(0), atol=1e-12)


def test_a_gap_is_noticed_and_not_averaged_over() -> None:
    mean = Pooled("mean", 8)
    mean.add(0, 2, np.ones(3))
    with pytest.raises(RuntimeError, match="a bug in the scheduler"):
        mean.add(5, 8, np.ones(3))


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_normalising_gives_length_one_at_any_scale(scale: float) -> None:
    np.testing.assert_allclose(normalised(scale * np.array([3.0, -4.0])), [0.6, -0.8], rtol=1e-12)


def test_zeros_have_no_direction_and_stay() -> None:
    assert normalised(np.zeros(3)).tolist() == [0, 0, 0]


def test_a_shortened_vector_has_length_one_again() -> None:
    np.testing.assert_allclose(shortened([0.6, 0.0, 0.8], 2), [1, 0])
    np.testing.assert_allclose(shortened([0.6, 0.0, 0.8], 3), [0.6, 0, 0.8])


def test_what_goes_with_drawing_does_not_go_with_pooling() -> None:
    for option in (
        {"temperature": 0.5},
        {"n": 2},
        {"max_tokens": 5},
        {"logit_bias": {3: 1.0}},
        {"stop": "x"},
    ):
        with pytest.raises(InvalidRequest, match=next(iter(option))):
            SamplingParams(pooling="mean", **option)
    with pytest.raises(InvalidRequest, match="mean, last"):
        SamplingParams(pooling="median")  # type: ignore[arg-type]


# -- against transformers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("fused", [False, True], ids=["torch", "fused"])
@pytest.mark.parametrize("name", ["llama", "llama_biased", "qwen3_moe", "deepseek_v3"])
def test_an_embedding_is_that_of_transformers(name: str, fused: bool, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path)
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    decoder = Decoder(spec)
    fill_decoder(decoder, FolderWeights(tmp_path, spec))
    if fused and why_not(decoder) is not None:
        pytest.skip("the native kernels do not play this model")
    prompts = [tiny.prompt(41, seed=4), tiny.prompt(9, seed=5)]
    found = engine_embeddings(FusedDecoder(decoder) if fused else decoder, prompts)
    for (index, pooling), embedding in found.items():
        expected = reference_embedding(model, prompts[index], pooling)
        np.testing.assert_allclose(embedding, expected, atol=2e-4)
    assert not np.allclose(found[0, "mean"], found[0, "last"], atol=1e-2)


# -- whatever happens around it ---------------------------------------------------------------------------------
def embedded_alone(prompt: list[int], params: SamplingParams) -> list[float]:
    engine = make_engine(DECODER, blocks=64, prefix_cache=False)
    engine.add(prompt, params, request_id="alone")
    embedding = run(engine)["alone"].embedding
    assert embedding is not None and math.isclose(sum(x * x for x in embedding), 1, abs_tol=1e-12)
    return embedding


@settings(max_examples=thorough.examples(12))
@given(
    seed=st.integers(0, 10**6),
    block_size=st.sampled_from([1, 4, 16]),
    spare_blocks=st.integers(0, 12),
    budget=st.sampled_from([5, 9, 64]),
    overlap=st.booleans(),
    tier_blocks=st.sampled_from([0, 60]),
)
def test_an_embedding_does_not_depend_on_chunks_company_cache_or_preemption(
    seed: int, block_size: int, spare_blocks: int, budget: int, overlap: bool, tier_blocks: int
) -> None:
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
    requests = []
    for _ in range(6):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        answered = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 20), ignore_eos=True)
        params = rng.choice([MEAN, LAST, answered])
        requests.append((prefix + own if rng.random() < 0.6 else own, params, rng.choice([0, 0, 1])))
    longest = max(len(prompt) for prompt, _, _ in requests) + 20
    engine = make_engine(
        DECODER, blocks=-(-longest // block_size) + spare_blocks, block_size=block_size, max_running=4,
        max_tokens_per_step=budget, overlap=overlap, tier_blocks=tier_blocks,
    )  # fmt: skip
    for index, (prompt, params, priority) in enumerate(requests):
        engine.add(prompt, params, request_id=f"r{index}", priority=priority)
    outputs = run(engine)
    engine.runner.close()
    for index, (prompt, params, _) in enumerate(requests):
        output = outputs[f"r{index}"]
        if params.pooling is None:
            assert output.embedding is None and len(output.samples[0].token_ids) == params.max_tokens
        else:
            np.testing.assert_allclose(output.embedding, embedded_alone(prompt, params), atol=1e-9)
            assert output.samples[0].finish_reason == "stop" and output.story.output_tokens == 0


def test_a_preempted_embedding_is_the_same() -> None:
    """Guards the property above: an embedding half done does give way."""
    long, params = [(7 * i) % VOCAB for i in range(60)], MEAN
    engine = make_engine(
        DECODER, blocks=17, block_size=4, max_running=4, max_tokens_per_step=8, prefix_cache=False,
    )  # fmt: skip
    engine.add(long, params, request_id="embedding", priority=1)

    def between(step: int) -> None:
        if step == 3:
            engine.add(long[::-1], SamplingParams(temperature=0, max_tokens=4), request_id="urgent")

    outputs = run(engine, between)
    story = outputs["embedding"].story
    assert story.preemptions == 1 and story.recomputed_tokens > 0
    np.testing.assert_allclose(outputs["embedding"].embedding, embedded_alone(long, params), atol=1e-9)


def test_only_the_last_tokens_embedding_may_use_a_cached_prefix_and_either_leaves_one() -> None:
    prompt = [(5 * i) % VOCAB for i in range(50)]
    engine = make_engine(DECODER, blocks=64)
    cached = []
    for params in (MEAN, MEAN, LAST, SamplingParams(temperature=0, max_tokens=1), LAST):
        engine.add(prompt, params, request_id="r")
        output = run(engine)["r"]
        cached.append(output.story.cached_tokens)
        if params.pooling is not None:
            np.testing.assert_allclose(output.embedding, embedded_alone(prompt, params), atol=1e-9)
    assert cached == [0, 0, 48, 48, 48]


def test_a_text_may_fill_the_context_and_no_more() -> None:
    engine = make_engine(DECODER, blocks=64, max_context=64)
    engine.add([3] * 64, MEAN, request_id="full")
    assert run(engine)["full"].embedding is not None
    with pytest.raises(InvalidRequest, match="65 tokens to embed; the context holds 64"):
        engine.add([3] * 65, MEAN)
    small = make_engine(DECODER, blocks=2, max_context=64)
    small.add([3] * 32, LAST, request_id="full")
    assert run(small)["full"].embedding is not None
    with pytest.raises(InvalidRequest, match="33 tokens to embed; the KV cache holds 32"):
        small.add([3] * 33, LAST)


def test_an_aborted_embedding_gives_nothing_and_its_story_says_why() -> None:
    engine = make_engine(DECODER, blocks=64, max_tokens_per_step=8)
    engine.add([3] * 60, MEAN, request_id="r")
    output = run(engine, lambda step: engine.abort("r") if step == 3 else None)["r"]
    assert output.embedding is None and output.samples[0].finish_reason == "abort"
    assert "mean pooling: every token's hidden state is needed" in output.story.describe()


def test_an_embedding_cannot_be_streamed() -> None:
    with pytest.raises(InvalidRequest, match="cannot be streamed"):
        make_engine(DECODER, blocks=8).add([3], MEAN, stream=True)


def test_hidden_states_that_are_not_finite_fail_their_request_and_no_other() -> None:
    broken = make_decoder("dense")
    broken.embed.weight.data[11] = math.nan
    engine = make_engine(broken, blocks=64)
    engine.add([3, 11, 4], MEAN, request_id="bad")
    engine.add([3, 4, 5], MEAN, request_id="good")
    outputs = run(engine)
    assert outputs["bad"].embedding is None and "not finite" in str(outputs["bad"].error)
    assert outputs["good"].embedding is not None and outputs["good"].error is None
