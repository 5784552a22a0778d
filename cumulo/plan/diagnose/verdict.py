"""Diagnosis of a pasted output: which cause is likely, on what evidence, and what to run next. `cumulo diagnose`
calls it.

Logs decide before numbers, since they name things; numbers are compared with the planner's network model. Where
neither is enough the answer is "I cannot tell" with the command that would tell. A run is called healthy only if it
reaches what such machines reach.
"""

from dataclasses import replace

from cumulo.base import quick_re as re
from cumulo.plan.diagnose.cards.pair_matrix import pair_verdict
from cumulo.plan.diagnose.cards.perftest_text import parse_osu, parse_perftests, without_rows
from cumulo.plan.diagnose.cards.perftest_verdict import osu_verdict, perftests_verdict
from cumulo.plan.diagnose.compare_runs import ComparedRun, compare_runs, settings_given
from cumulo.plan.diagnose.diagnosis import CAUSES, LOG_STEP, PAIRS_STEP, PORTS_STEP, TEST_STEP, Diagnosis
from cumulo.plan.diagnose.failures_text import failure_verdict
from cumulo.plan.diagnose.flight_table import parse_progress
from cumulo.plan.diagnose.flight_text import parse_hang
from cumulo.plan.diagnose.hang_verdict import hang_verdict
from cumulo.plan.diagnose.link_states import link_states
from cumulo.plan.diagnose.log_verdict import log_verdict
from cumulo.plan.diagnose.named.fault import explained
from cumulo.plan.diagnose.named.faults import named_faults
from cumulo.plan.diagnose.nccl_case import NcclCase
from cumulo.plan.diagnose.nccl_log_text import condensed, parse_nccl_log
from cumulo.plan.diagnose.nccl_tests_text import TestRun, nccl_test_runs, unwrapped
from cumulo.plan.diagnose.numbers_verdict import congested, numbers_verdict
from cumulo.plan.diagnose.plain_text import plain_text
from cumulo.plan.diagnose.states_verdict import far_cards
from cumulo.plan.diagnose.table_rows import with_sizes
from cumulo.plan.diagnose.table_verdict import small_messages, stated_ranks, wrong_results

__all__ = ["CAUSES", "Diagnosis", "diagnose"]
# Of several runs the worst counts; a cause that a run's text names comes before what cannot be told.
_MILD = ("unknown", "small-messages", "healthy")


def diagnose(text: str) -> Diagnosis:
    """What was measured or failed, and what else the text names that explains it."""
    text = condensed(plain_text(text))
    return explained(_symptom(text), named_faults(text))


def _symptom(text: str) -> Diagnosis:
    if (hang := parse_hang(text) or parse_progress(text)) is not None:
        return hang_verdict(hang)
    text = with_sizes(unwrapped(text))
    runs, log = list(nccl_test_runs(without_rows(text))), parse_nccl_log(text)
    perftests, osu = parse_perftests(text), parse_osu(text)
    if failure := failure_verdict(text, measured=bool(runs)):
        return failure
    if not runs and perftests:
        return perftests_verdict(perftests, text)
    if not runs and osu is not None:
        return osu_verdict(osu, text)
    if len(runs) > 1:
        return _of_several(runs, text)
    if not runs and log is None:
        return pair_verdict(text) or _nothing(text)
    found = _nccl_verdict(NcclCase(text, runs[0].test if runs else None, log))
    return _unjudged(found, text) if runs else _contrary(found, text)


def _unjudged(found: Diagnosis, text: str) -> Diagnosis:
    """Nothing tells what the bandwidth should be, but a port is down."""
    if found.cause != "unknown" or found.share is not None or not (down := link_states(text).down):
        return found
    return replace(
        found,
        cause="rail-down",
        sentence="A port is down.",
        evidence=(f"the text says: {down[:120]}", *found.evidence),
        next_steps=(PORTS_STEP, PAIRS_STEP),
        confidence="medium",
    )


def _of_several(runs: list[TestRun], text: str) -> Diagnosis:
    """What a run's own text names counts first, then what runs say of each other, then each by its numbers."""
    cases = [_run_case(run, text) for run in runs]
    found = [_nccl_verdict(case) for case in cases]
    worst = _worst(found)
    if worst.cause not in _MILD and worst.confidence == "high":
        return worst
    compared, settings = [], frozenset[str]()
    for run in runs:
        settings = settings_given(run.text, settings)
        compared.append(ComparedRun(run.title, _run_case(run, text), settings))
    return compare_runs(compared, text) or _contrary(_hosts_alone(worst, runs), text)


def _hosts_alone(found: Diagnosis, runs: list[TestRun]) -> Diagnosis:
    """Runs of one host each: they say nothing of the network, though people may think so."""
    hosts = {run.test.devices[0].host for run in runs if run.test.hosts == 1}
    if found.cause != "healthy" or len(hosts) < 2 or any(run.test.hosts != 1 for run in runs):
        return found
    alone = f"each of the {len(hosts)} hosts ran alone: nothing went over the network"
    return replace(found, evidence=(*found.evidence, alone), next_steps=(TEST_STEP,), confidence="medium")


def _contrary(found: Diagnosis, text: str) -> Diagnosis:
    """Healthy is not said while the text says that a port is down."""
    if found.cause != "healthy" or not (down := link_states(text).down):
        return found
    return replace(
        found,
        cause="unknown",
        sentence="The bandwidth is what is usual, and yet a port is down: check that it is one that nothing uses.",
        evidence=(f"the text says: {down[:120]}", *found.evidence),
        next_steps=(PORTS_STEP, LOG_STEP),
        confidence="low",
    )


def _run_case(run: TestRun, text: str) -> NcclCase:
    """Of one of several runs: what its own part of the text does not name may stand in the rest of it."""
    outside = "\n".join(line for line in text.splitlines() if "NCCL INFO" not in line)
    own = parse_nccl_log(run.text)
    named = NcclCase(run.text, run.test, own)
    return named if named.expected is not None else NcclCase(outside, run.test, own)


def _nccl_verdict(case: NcclCase) -> Diagnosis:
    found = (
        wrong_results(case)
        or stated_ranks(case)
        or log_verdict(case)
        or small_messages(case)
        or congested(case)
        or numbers_verdict(case)
    )
    found = found or (far_cards(case) if case.nodes > 1 and case.share is None else None)
    return found or case.answer("unknown", "This text does not say enough.", (LOG_STEP, TEST_STEP), "low")


def _worst(found: list[Diagnosis]) -> Diagnosis:
    order = {cause: at for at, cause in enumerate(_MILD, start=1)}
    at = min(range(len(found)), key=lambda number: order.get(found[number].cause, 0))
    others = ", ".join(f"{number + 1}: {one.cause}" for number, one in enumerate(found) if number != at)
    return replace(
        found[at],
        evidence=(f"this is run {at + 1} of {len(found)} in the text ({others})", *found[at].evidence),
    )


_MATRIX = re.compile(r"^\s*GPU0\s+GPU1\s", re.MULTILINE)


def _nothing(text: str) -> Diagnosis:
    states = link_states(text)
    if states.down:
        return Diagnosis(
            "rail-down", "A port is down.", (f"the text says: {states.down[:120]}",), (TEST_STEP,), "medium"
        )
    # The matrix of `nvidia-smi topo -m` is a map of the machine, not a measurement; another command reads it.
    read = (
        ("run `cumulo topology FILE` on this file: it reads such a matrix",) if _MATRIX.search(text) else ()
    )
    return Diagnosis(
        "unknown",
        "The text contains no table of nccl-tests, no NCCL log, no perftest output and no flight recorder.",
        (),
        (*read, TEST_STEP, LOG_STEP),
        "low",
    )
