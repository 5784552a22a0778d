"""Guides from strangers: what eats time or memory is refused, and what is left takes no step's time."""

import contextlib
import gc
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cumulo.base.sandbox import worker as sandbox_worker
from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.guides import guided
from cumulo.engine.guides import trial as guide_trial
from cumulo.engine.guides.guided import Guidance
from cumulo.errors import InvalidRequest
from tests.engine.guided_engine import EOS, TOKENIZER, VOCAB, make_engine
from tests.engine.tiny_engine import run

pytest.importorskip("llguidance")
PROMPT = [40, 41, 42]


def test_a_schema_that_eats_the_machine_is_refused_and_leaves_nothing_running():
    """Found by attackers: its automaton has a hundred million states, and no thread can be interrupted."""
    fresh = Guidance(TOKENIZER, VOCAB, (EOS,))
    fresh.check(Guide("regex", "ab"))
    threads, resident_bytes = threading.active_count(), _resident_bytes()
    with pytest.raises(
        InvalidRequest, match="too complex to compile: it takes more than 2 s of processor time"
    ):
        fresh.check(Guide("json_schema", '{"type":"integer","multipleOf":99999989}'))
    assert threading.active_count() == threads
    assert _resident_bytes() < resident_bytes + (64 << 20)
    fresh.check(Guide("regex", "abc"))
    fresh.close()


def test_a_guide_whose_trial_gets_no_processor_is_not_refused_but_may_be_sent_again(monkeypatch):
    monkeypatch.setattr(guide_trial, "TRIAL", replace(guide_trial.TRIAL, wall_s=0.1))
    monkeypatch.setattr(sandbox_worker, "_GRACE_S", 0.1)
    fresh = Guidance(TOKENIZER, VOCAB, (EOS,)).new_worker()
    fresh.start()
    keeper = fresh._process.pid
    while not (children := Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()):
        os.sched_yield()
    child = int(children[0])
    os.kill(child, signal.SIGSTOP)
    with pytest.raises(guide_trial.GuideCompilerBusy, match=r"too busy to compile this guide: .* try again"):
        guide_trial.try_out(fresh, Guide("regex", "ab"), guide_trial.TRIAL)
    with contextlib.suppress(
        ProcessLookupError
    ):  # stopped so early, it may not have asked to die with its keeper
        os.kill(child, signal.SIGKILL)
    assert guide_trial.try_out(fresh, Guide("regex", "ab"), replace(guide_trial.TRIAL, wall_s=60)).cpu_s < 2
    fresh.close()


def test_a_guide_that_needs_much_memory_is_refused(monkeypatch):
    monkeypatch.setattr(guide_trial, "TRIAL", replace(guide_trial.TRIAL, memory_bytes=24 << 20))
    fresh = Guidance(TOKENIZER, VOCAB, (EOS,))
    with pytest.raises(InvalidRequest, match="it needs more than 24 MiB of memory"):
        guide_trial.try_out(
            fresh.new_worker(),
            Guide("json_schema", '{"type":"integer","multipleOf":999983}'),
            guide_trial.TRIAL,
        )


def test_guides_whose_steps_take_long_are_refused_before_they_take_one(monkeypatch):
    """Very many terminals that overlap; in the engine every request of a step would wait for its mask."""
    monkeypatch.setattr(guide_trial, "MAX_STEP_S", 1e-6)
    with pytest.raises(InvalidRequest, match="every request of a step waits for it"):
        Guidance(TOKENIZER, VOCAB, (EOS,)).check(Guide("regex", "[a-z]+[0-9]{3,7}"))


def test_a_guide_that_turns_slow_ends_its_own_request_and_is_refused_from_then_on(monkeypatch):
    fresh = Guidance(TOKENIZER, VOCAB, (EOS,))
    slow, other = Guide("regex", "[a-z]{50}"), Guide("regex", "[0-9]{50}")
    engine = make_engine(guidance=fresh)
    engine.add(PROMPT, SamplingParams(guide=slow, max_tokens=40), request_id="slow")
    monkeypatch.setattr(guided, "_SLOW_MASK_S", 0.0)
    assert "the guide failed: it is too complex" in run(engine)["slow"].error
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match="takes too long"):
        engine.add(PROMPT, SamplingParams(guide=slow, max_tokens=40))
    engine.add(PROMPT, SamplingParams(guide=other, max_tokens=10))


def test_a_lexer_that_is_full_is_renewed_in_the_middle_of_an_answer(monkeypatch):
    """All requests with one guide share its lexer, which only grows."""
    monkeypatch.setitem(guide_trial.PARSER_LIMITS, "max_lexer_states", 50)
    fresh = Guidance(TOKENIZER, VOCAB, (EOS,))
    renewed, renew = [], fresh.fresh
    monkeypatch.setattr(fresh, "fresh", lambda guide: (renewed.append(guide), renew(guide))[1])
    guide = Guide("regex", "([a-z]{1,9}[0-9]{1,9} ){60}")
    engine = make_engine(guidance=fresh)
    for seed in range(6):
        engine.add(PROMPT, SamplingParams(guide=guide, max_tokens=15, seed=seed), request_id=str(seed))
    outputs = run(engine)
    assert [done.error for done in outputs.values()] == [None] * 6
    assert renewed and all(len(done.text) >= 15 for done in outputs.values())


def test_a_compiled_guide_is_kept_for_as_long_as_a_request_may_need_it(monkeypatch):
    monkeypatch.setattr(guided, "_CACHED_GUIDES", 2)
    fresh = Guidance(TOKENIZER, VOCAB, (EOS,))
    guides = [Guide("regex", f"a{{{count}}}") for count in range(1, 7)]
    for guide in guides:
        fresh.check(guide)
    monkeypatch.setattr(fresh, "_compile", None)  # nothing is compiled between steps
    for guide in guides:
        assert fresh.matcher(guide).consume_tokens([ord("a")])
    assert len(fresh._held) == 6
    del guides, guide
    gc.collect()
    assert len(fresh._held) <= 2


def test_guides_that_would_fill_the_memory_together_have_to_wait(monkeypatch):
    fresh = Guidance(TOKENIZER, VOCAB, (EOS,))
    fresh.check(Guide("regex", "ab"))
    monkeypatch.setattr(guided, "_MOST_KEPT_BYTES", -1)
    with pytest.raises(guide_trial.GuideCompilerBusy, match="try again"):
        fresh.check(Guide("regex", "abc"))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
