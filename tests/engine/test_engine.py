"""The loop around the scheduler: nobody is lost, whatever the runner or the client does."""

import subprocess
import sys

import pytest

from cumulo.engine.decide.params import SamplingParams
from cumulo.errors import InvalidRequest
from tests.engine.tiny_engine import VOCAB, make_decoder, make_engine, run

DECODER = make_decoder("dense")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Sabotaged:
    """A decoder that misbehaves when a certain token is in the step."""

    def __init__(self, token: int, mode: str) -> None:
        self.token, self.mode = token, mode

    def forward(self, batch, cache):
        hidden = DECODER.forward(batch, cache)
        if (batch.token_ids == self.token).any():
            if self.mode == "raise":
                raise RuntimeError("a cosmic ray")
            starts = batch.query_starts.tolist()
            for row, last in enumerate(batch.logit_rows.tolist()):
                first = max(start for start in starts if start <= last)
                if (batch.token_ids[first : last + 1] == self.token).any():
                    hidden[row] = float("nan")
        return hidden

    def logits(self, hidden):
        return DECODER.logits(hidden)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_ends_its_requests_with_an_error_and_the_engine_goes_on(overlap):
    engine = make_engine(DECODER, blocks=64, overlap=overlap)
    engine.runner.model = Sabotaged(60, "raise")
    doomed = engine.add([1, 2, 60], GREEDY)
    outputs = run(engine)
    assert "a cosmic ray" in outputs[doomed.id].error
    assert outputs[doomed.id].samples[0].finish_reason == "error"
    fine = engine.add(
        [1, 2, 3], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={60: -100})
    )
    assert run(engine)[fine.id].error is None
    engine.runner.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_whose_logits_are_not_numbers_fails_alone(overlap):
    engine = make_engine(DECODER, blocks=64, overlap=overlap)
    engine.runner.model = Sabotaged(60, "nan")
    never_60 = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={60: -100.0})
    doomed = engine.add([1, 2, 60], never_60)
    fine = engine.add([1, 2, 3], never_60)
    outputs = run(engine)
    assert outputs[doomed.id].error
    assert outputs[fine.id].error is None
    assert len(outputs[fine.id].samples[0].token_ids) == 12
    engine.runner.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_request_returns_what_it_had_and_frees_its_blocks_at_once(overlap):
    engine = make_engine(DECODER, blocks=64, overlap=overlap)
    whole = run(make_engine_with(engine, GREEDY, "whole"))["whole"].samples[0].token_ids
    victim = engine.add([5, 6, 7], GREEDY, request_id="victim")
    for _ in range(6):
        engine.step()
    assert engine.abort("victim")
    assert engine.scheduler.pool.used_count == 0
    output = run(engine)["victim"]
    tokens = output.samples[0].token_ids
    assert output.samples[0].finish_reason == "abort"
    assert 0 < len(tokens) < 12 and tokens == whole[: len(tokens)]
    assert not engine.abort(victim.id)
    engine.runner.close()


def make_engine_with(engine, params, name):
    engine.add([5, 6, 7], params, request_id=name)
    return engine


def test_streams_deliver_every_token_once_and_the_finish_reason_last():
    engine = make_engine(DECODER, blocks=64, overlap=True)
    sampled = SamplingParams(n=3, seed=1, max_tokens=9, ignore_eos=True, logprobs=1)
    engine.add([1, 2, 3], sampled, request_id="stream", stream=True)
    deltas, finished = [], []
    while engine.has_work:
        output = engine.step()
        deltas += output.deltas
        finished += output.finished
    engine.runner.close()
    for sample in finished[0].samples:
        own = [d for d in deltas if d.index == sample.index]
        assert [t for d in own for t in d.token_ids] == sample.token_ids
        assert [d.finish_reason for d in own] == [None] * (len(own) - 1) + ["length"]
        assert [p for d in own for p in d.logprobs] == sample.logprobs
        assert [p.token for p in sample.logprobs] == sample.token_ids


def test_impossible_requests_are_refused_by_name_and_cost_nothing():
    engine = make_engine(DECODER, blocks=8)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add([], GREEDY)
    with pytest.raises(InvalidRequest, match=f"token 9999; token ids are 0 to {VOCAB - 1}"):
        engine.add([1, 9999], GREEDY)
    with pytest.raises(InvalidRequest, match="token -1"):
        engine.add([-1], GREEDY)
    with pytest.raises(InvalidRequest, match="logit_bias contains token 500"):
        engine.add([1], SamplingParams(logit_bias={500: 1.0}))
    with pytest.raises(InvalidRequest, match="stop strings need a tokenizer"):
        engine.add([1], SamplingParams(stop="x"))
    with pytest.raises(InvalidRequest, match="shorten the prompt"):
        engine.add([1] * 200, GREEDY)
    with pytest.raises(InvalidRequest, match="cannot be streamed"):
        engine.add([1], SamplingParams(n=1, best_of=3), stream=True)
    with pytest.raises(InvalidRequest, match="token ids"):
        engine.add(["a"], GREEDY)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": -1}, "temperature must be in"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"max_tokens": -5}, "max_tokens must be 1 or more"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number"),
        ({"top_p": 0}, "top_p must be in"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"min_p": 2}, "min_p must be in"),
        ({"stop": ""}, "must not be empty"),
        ({"stop": ("a", "")}, "must not be empty"),
        ({"stop": (3,)}, "stop must be text"),
        ({"n": 0}, "n must be 1"),
        ({"n": 3, "best_of": 2}, "best_of must be"),
        ({"n": 3, "beam_width": 2}, "beam_width must be"),
        ({"min_tokens": 9, "max_tokens": 3}, "is more than max_tokens"),
        ({"logprobs": 1000}, "logprobs must be"),
        ({"presence_penalty": 3}, "presence_penalty must be in"),
        ({"repetition_penalty": 0}, "repetition_penalty must be > 0"),
        ({"logit_bias": {-1: 1.0}}, "not a token id"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias of 1"),
        ({"seed": "x"}, "seed must be a whole number"),
    ],
)
def test_parameters_that_make_no_sense_are_refused_in_words(options, words):
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**options)


def test_min_tokens_holds_off_the_end_and_stop_tokens_bring_it():
    greedy = run(make_engine_with(make_engine(DECODER, blocks=64), GREEDY, "r"))["r"].samples[0].token_ids
    stop = greedy[2]
    at = greedy.index(stop)
    stopped = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    sample = run(make_engine_with(make_engine(DECODER, blocks=64), stopped, "r"))["r"].samples[0]
    assert sample.token_ids == greedy[: at + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    later = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), min_tokens=8
    )
    sample = run(make_engine_with(make_engine(DECODER, blocks=64), later, "r"))["r"].samples[0]
    assert stop not in sample.token_ids[:8]
    assert len(sample.token_ids) >= 8


def test_log_probabilities_are_those_of_the_model():
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    engine = make_engine(DECODER, blocks=64, max_tokens_per_step=9)
    engine.add(prompt, params, request_id="r")
    output = run(engine)["r"]
    sample = output.samples[0]
    # One pass over everything, without the engine's chunks.
    check = make_engine(DECODER, blocks=64)
    everything = prompt + sample.token_ids
    check.add(everything, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3), request_id="all")
    reference = run(check)["all"].prompt_logprobs
    got = output.prompt_logprobs + sample.logprobs
    assert [p.token for p in got] == everything[1:]
    for ours, theirs in zip(got, reference, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)
        assert ours.rank == theirs.rank
    assert sample.cumulative_logprob == pytest.approx(sum(p.logprob for p in sample.logprobs))
    assert all(len(p.top) == 3 and p.top[0][0] == p.token for p in sample.logprobs)


def test_the_engine_is_idle_and_cheap_when_nothing_is_asked():
    engine = make_engine(DECODER, blocks=8, overlap=True)
    assert not engine.has_work
    output = engine.step()
    assert output.deltas == [] and output.finished == []
    engine.runner.close()


def test_torch_is_not_imported_by_what_decides():
    code = (
        "import sys; import cumulo.engine.decide.scheduler, cumulo.engine.decide.params, cumulo.spec.model; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
