"""The verdict by what a table says before its bandwidths are judged: ranks that did not run, sums that are wrong,
messages that are small."""

from cumulo.base import quick_re as re
from cumulo.base.quantities import quantity
from cumulo.collectives.decide.schedule import busbw_factor
from cumulo.plan.diagnose.diagnosis import LOG_STEP, TEST_STEP, Diagnosis
from cumulo.plan.diagnose.nccl_case import NcclCase
from cumulo.plan.diagnose.table_rows import TestRow

_HALF = 0.5
_USUAL_LATENCY = 3.0  # times what the model expects: launches differ between drivers and hosts
_FLAT = 3.0  # times what the smallest message takes: latency is most of it
_DIP = 0.7  # of the bandwidths before and after


def stated_ranks(case: NcclCase) -> Diagnosis | None:
    if case.test is None:
        return None
    if case.test.ratio is not None and case.test.ratio < 0.05:
        return case.answer(
            "wrong-ranks",
            "busbw is 0: every process ran alone, with one rank. The processes did not find each other.",
            ("build nccl-tests with MPI=1, and check that mpirun and the build use the same MPI",),
            "high",
        )
    if case.inferred is None:
        return _listed_ranks(case)
    best, low, high = case.inferred
    slack = 0.15 + 0.02 * best
    claimed = case.test.claimed
    wrong = claimed.wrong(low - slack, high + slack)
    if wrong and (other := case.test.other_ranks()) is not None:  # which collective it is was only mentioned
        wrong = tuple(one for one in wrong if one in claimed.wrong(other[1] - slack, other[2] + slack))
    some_fit = len(wrong) < len(claimed.sure) + len(claimed.either)
    wrong = tuple(one for one in wrong if not _of_each(one, case, round(best), some_fit))
    one_node = claimed.nodes > case.test.hosts and len(case.test.devices) == round(best)
    more = [one for one in wrong if one > best]  # fewer may be those of each node
    said = [one for one in claimed.words if one in more]
    misspoken = (
        bool(said) and len(said) == len(claimed.words) and claimed.command is None and not claimed.either
    )
    misspoken = misspoken or any(one in more for one in claimed.every)
    fits = some_fit and case.test.hosts and claimed.command not in wrong and not one_node
    if not wrong or (fits and not misspoken):
        return None
    case.evidence.append(
        f"busbw/algbw is {case.test.ratio:.4f}, which an {case.operation} of {best:.0f} ranks has; the "
        f"text states {', '.join(str(one) for one in wrong)}"
    )
    if case.log is not None and case.log.ranks in wrong and not case.test.listed:
        true = case.test.rows[-1].algbw * busbw_factor(case.operation, case.log.ranks or 2)
        return case.answer(
            "wrong-ranks",
            f"busbw was computed for {round(best)} ranks, and NCCL ran {case.log.ranks}: it is {true:.4g} GB/s.",
            ("count ranks, not nodes, in the factor of busbw",),
            "high",
        )
    return case.answer(
        "wrong-ranks",
        f"{round(best)} ranks ran, not {wrong[0]}. Compare the bandwidth with that of {round(best)} ranks.",
        ("check -np, -g and the host file; count the `Rank` lines at the top of the output",),
        "high",
    )


def _of_each(said: int, case: NcclCase, ranks: int, some_fit: bool) -> bool:
    """It is said of one machine ("8x A100"): another number fits, or each host that the text names has as many."""
    assert case.test is not None
    several = said > 1 and said in case.test.claimed.words and ranks > said and ranks % said == 0
    return several and (some_fit or ranks == said * case.hosts_logged)


def _listed_ranks(case: NcclCase) -> Diagnosis | None:
    """Where bandwidths do not tell the ranks, as of a broadcast: the list of devices and what was asked for."""
    assert case.test is not None
    listed, claimed = case.test.listed, case.test.claimed
    asked = [one for one in (claimed.command, *claimed.every) if one is not None and one != listed]
    if not listed or not asked:
        return None
    case.evidence.append(f"the output lists {listed} ranks; the text states {asked[0]}")
    return case.answer(
        "wrong-ranks",
        f"{listed} ranks ran, not {asked[0]}. Compare the bandwidth with that of {listed} ranks.",
        ("check -np, -g and the host file; count the `Rank` lines at the top of the output",),
        "medium",
    )


def wrong_results(case: NcclCase) -> Diagnosis | None:
    rows = [row for row in case.test.rows if row.wrong] if case.test else []
    failed = re.search(r"Out of bounds values\s*:\s*([1-9]\d*)", case.text)
    if not rows and failed is None:
        return None
    if rows:
        case.evidence.append(
            f"#wrong is {rows[0].wrong} at {quantity(rows[0].size_bytes, 'B')}, and not 0 in {len(rows)} of "
            f"{len(case.test.rows) if case.test else 0} rows"
        )
    return case.answer(
        "wrong-results",
        "Sums differ from what they should be: memory, a link or a driver corrupts data. Do not train on it.",
        (
            "run each node alone, then pairs, to find the GPU or card that is always in a wrong run",
            "run `nvidia-smi -q -d ECC,PAGE_RETIREMENT` and `dcgmi diag -r 3` on those nodes",
        ),
        "high",
    )


def small_messages(case: NcclCase) -> Diagnosis | None:
    if case.test is None or case.full_rate:
        return None
    if case.test.is_cut:
        return case.answer(
            "unknown",
            f"The table ends at {quantity(case.test.rows[-1].size_bytes, 'B')}, long before the largest message "
            f"that was asked for ({quantity(case.test.asked_bytes, 'B')}).",
            ("paste the rest of the output, or run again if it stopped there", LOG_STEP),
            "high",
        )
    smallest, largest = case.test.rows[0], case.test.rows[-1]
    case.evidence.append(f"the largest message has {quantity(largest.size_bytes, 'B')}")
    latency = ""
    if case.expected is not None:
        usual = case.expected.latency_us(case.operation)
        case.evidence.append(f"{smallest.time_us:.0f} µs for the smallest; about {usual:.0f} µs are usual")
        if smallest.size_bytes <= 64 << 10:
            latency = _latency_words(smallest.time_us / usual)
        slow = smallest.size_bytes <= 64 << 10 and smallest.time_us > 8 * usual
        if slow and largest.time_us < _FLAT * smallest.time_us:
            return _slow_latency(case)
        if slow or (largest.size_bytes > 4 << 20 and case.share is not None and case.share < _HALF):
            return None if largest.size_bytes > 4 << 20 else _slow_latency(case)
    return case.answer(
        "small-messages",
        f"At these sizes latency counts, not bandwidth: a low busbw says nothing about the links.{latency}",
        ("run with -b 8 -e 8G -f 2, and read busbw from 256 MiB up",),
        "high",
    )


def _latency_words(times: float) -> str:
    if times <= _USUAL_LATENCY:
        return " The latency is normal."
    return f" The latency is {times:.1f} times what is usual: look at the cores of the processes and at the clocks."


def _slow_latency(case: NcclCase) -> Diagnosis:
    return case.answer(
        "unknown",
        "Even the smallest messages take long, so that the bandwidth says nothing: the processes are held up "
        "(cores, clocks, another job), or messages take a long way.",
        (
            "run with `mpirun --report-bindings`, and see that each process has cores of its own",
            LOG_STEP,
            TEST_STEP,
        ),
        "low",
    )


def dips_of(case: NcclCase) -> list[TestRow]:
    """Large messages that reach much less than smaller and larger ones do: no link is that slow, so it is others'
    traffic, or packets that are lost now and then."""
    rows = [row for row in case.test.rows if row.size_bytes >= 32 << 20] if case.test else []
    return [
        row
        for at, row in enumerate(rows)
        if any(row.busbw < _DIP * one.busbw for one in rows[:at])
        and any(row.busbw < _DIP * one.busbw for one in rows[at + 1 :])
    ]
