"""GuideChecker: guides are compiled beside the engine's loop, which is woken when they are."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.guides import trial
from cumulo.engine.guides.guided import Guidance
from cumulo.serve.engine_link import guide_checker
from cumulo.serve.engine_link.guide_checker import Checked, GuideChecker
from cumulo.serve.engine_link.messages import Submit
from tests.engine.guided_engine import EOS, TOKENIZER, VOCAB

pytest.importorskip("llguidance")
BOMB = Guide("json_schema", '{"type":"integer","multipleOf":99999989}')


@pytest.fixture
def checker() -> Iterator[GuideChecker]:
    made = GuideChecker(Guidance(TOKENIZER, VOCAB, (EOS,)))
    yield made
    made.close()


def submit(request_id: str, guide: Guide, tenant: str = "") -> Submit:
    return Submit(request_id, b"", SamplingParams(guide=guide), stream=False, tenant=tenant)


def take(checker: GuideChecker, *request_ids: str) -> dict[str, Checked]:
    """Waits until these are through."""
    taken: dict[str, Checked] = {}
    while not set(request_ids) <= set(taken):
        assert checker.done.wait(60), "the loop is not woken"
        taken |= {one.submit.request_id: one for one in checker.take_checked()}
    return taken


def test_guides_come_back_with_what_is_wrong_with_them(checker: GuideChecker) -> None:
    assert checker.take_checked() == []
    checker.begin(submit("good", Guide("regex", "[a-z]+")))
    checker.begin(submit("bad", Guide("json_schema", '{"type": "frob"}')))
    checker.begin(submit("also good", Guide("json_object")))
    assert list(checker.pending) == ["good", "bad", "also good"]
    taken = take(checker, "good", "bad", "also good")
    assert taken["good"].refusal is None and taken["also good"].refusal is None
    refusal = taken["bad"].refusal
    assert refusal is not None and "frob" in refusal and not taken["bad"].busy
    assert checker.checked == 3 and not checker.pending


@pytest.mark.long
def test_other_keys_and_known_guides_do_not_wait_for_slow_ones(
    checker: GuideChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trial, guide_checker):  # a quarter of their time, of which hostile guides use all
        monkeypatch.setattr(module, "TRIAL", replace(trial.TRIAL, cpu_s=0.5))
    checker.begin(submit("known", Guide("regex", "known"), "honest"))
    take(checker, "known")
    bombs = [f"bomb {number}" for number in range(6)]
    for number, name in enumerate(bombs):
        bomb = Guide("json_schema", f'{{"type":"integer","multipleOf":{99999989 + 2 * number}}}')
        checker.begin(submit(name, bomb, "attacker"))
    checker.begin(submit("quick", Guide("regex", "quick"), "honest"))
    checker.begin(submit("again", Guide("regex", "known"), "honest"))
    seen = take(checker, "quick", "again")
    assert seen["quick"].refusal is None and seen["again"].refusal is None
    assert len(seen) < 8  # most of the attack is still to be done
    first = seen.get("bomb 0") or take(checker, "bomb 0")["bomb 0"]
    assert "too complex to compile" in str(first.refusal) and not first.busy


def test_a_key_with_very_many_guides_is_told_to_come_back(
    checker: GuideChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker._queue, "_most_waiting", 3)
    names = [f"{number}" for number in range(9)]
    with checker._changed:  # nothing is taken meanwhile
        for name in names:
            checker.begin(submit(name, Guide("regex", f"a{name}"), "many"))
        checker.begin(submit("same", Guide("regex", "a0"), "many"))
        checker.begin(submit("other", Guide("regex", "a8"), "few"))
    taken = take(checker, *names, "same", "other")
    assert [taken[name].busy for name in names] == [False] * 3 + [True] * 6
    assert "try again" in str(taken["8"].refusal)
    assert taken["same"].refusal is None and taken["other"].refusal is None


def test_a_guide_nobody_waits_for_any_more_is_not_compiled(
    checker: GuideChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Guide] = []
    monkeypatch.setattr(guide_checker, "try_out", lambda worker, guide, limits: tried.append(guide))
    with checker._changed:
        checker.begin(submit("gone", BOMB))
        checker.pending["gone"] = True  # as an abort does
    gone = take(checker, "gone")["gone"]
    assert gone.aborted and gone.refusal is not None and not tried
