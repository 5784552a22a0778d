"""Diagnosis of a pasted output: which cause is likely, on what evidence, and what to run next. `cumulo diagnose`
calls it.

Logs decide before numbers, since they name things; numbers are compared with the planner's network model. Where
neither is enough the answer is "I cannot tell" with the command that would tell. A run is called healthy only if it
reaches what such machines reach.
"""

from cumulo.plan.diagnose.diagnosis import CAUSES, LOG_STEP, TEST_STEP, Diagnosis
from cumulo.plan.diagnose.flight_text import parse_hang
from cumulo.plan.diagnose.hang_verdict import hang_verdict
from cumulo.plan.diagnose.log_verdict import log_verdict
from cumulo.plan.diagnose.nccl_case import NcclCase
from cumulo.plan.diagnose.nccl_log_text import parse_nccl_log
from cumulo.plan.diagnose.nccl_tests_text import parse_nccl_tests
from cumulo.plan.diagnose.numbers_verdict import congested, numbers_verdict, small_messages, stated_ranks
from cumulo.plan.diagnose.perftest_text import parse_perftest
from cumulo.plan.diagnose.perftest_verdict import perftest_verdict

__all__ = ["CAUSES", "Diagnosis", "diagnose"]


def diagnose(text: str) -> Diagnosis:
    if (hang := parse_hang(text)) is not None:
        return hang_verdict(hang)
    test, log = parse_nccl_tests(text), parse_nccl_log(text)
    if test is None and (perftest := parse_perftest(text)) is not None:
        return perftest_verdict(perftest)
    if test is None and log is None:
        return Diagnosis(
            "unknown",
            "The text contains no table of nccl-tests, no NCCL log, no perftest output and no flight recorder.",
            (),
            (TEST_STEP, LOG_STEP),
            "low",
        )
    case = NcclCase(text, test, log)
    found = (
        stated_ranks(case)
        or log_verdict(case)
        or small_messages(case)
        or congested(case)
        or numbers_verdict(case)
    )
    return found or case.answer("unknown", "This text does not say enough.", (LOG_STEP, TEST_STEP), "low")
