"""What several runs of one text say that none of them says alone: which is slower than its like, and what they
differ in. `diagnose` asks here before it judges each run by itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from cumulo.base import quick_re as re
from cumulo.base.quantities import quantity
from cumulo.plan.diagnose.diagnosis import (
    PAIRS_STEP,
    PAUSES_STEP,
    PORTS_STEP,
    TOPO_STEP,
    WIDTH_STEP,
    Diagnosis,
)
from cumulo.plan.diagnose.link_states import link_states
from cumulo.plan.diagnose.nccl_case import MOST_PCIE, NcclCase

_SLOWER = 0.75  # of the like run's bandwidth
_BEHIND, _LIKE_RUNS = 0.92, 2  # of the bandwidth that so many like runs or more agree on
_ALONE = re.compile(r"\b(?:alone|by itself|only|single|one at a time|separately)\b", re.IGNORECASE)
_TOGETHER = re.compile(
    r"\b(?:both|together|same time|simultaneous\w*|concurrent\w*|in parallel)\b", re.IGNORECASE
)
_SETTING = re.compile(r"\b(NCCL_(?!DEBUG)\w+=\S+)")
_NAME = re.compile(r"\b(?=\w*\d)[A-Za-z][\w.-]*\d\w*\b")  # of a host or a card: c10, mlx5_3


@dataclass(frozen=True, slots=True)
class ComparedRun:
    title: str
    case: NcclCase
    settings: frozenset[str] = frozenset()

    def busbw(self, size_bytes: int) -> float | None:
        rows = self.case.test.rows if self.case.test else ()
        return next((row.busbw for row in rows if row.size_bytes == size_bytes), None)


def settings_given(text: str, before: frozenset[str]) -> frozenset[str]:
    """In the part of one run; one that names none has those of the run before it."""
    own = "\n".join(line for line in text.splitlines() if "NCCL INFO" not in line)
    return frozenset(_SETTING.findall(own)) or before


def compare_runs(runs: Sequence[ComparedRun], text: str) -> Diagnosis | None:
    """None: they are not alike, or about equal."""
    if (behind := _behind_the_others(runs, text)) is not None:
        return behind
    for fast in runs:
        for slow in runs:
            size = _common_size(fast, slow)
            if fast is slow or size is None or fast.settings != slow.settings:
                continue
            quick, late = fast.busbw(size), slow.busbw(size)
            if quick is None or late is None or late >= _SLOWER * _due(fast, slow, size) * quick:
                continue
            if (found := _verdict(fast, slow, runs, size)) is not None:
                return found
    return None


def _behind_the_others(runs: Sequence[ComparedRun], text: str) -> Diagnosis | None:
    """Of several runs of one kind all but a few agree, and these few are slower, if only by one card's part."""
    for slow in runs:
        like = [one for one in runs if one is not slow and _alike(one, slow)]
        sizes = [size for one in like if (size := _common_size(one, slow)) is not None]
        if len(sizes) < _LIKE_RUNS:
            continue
        size = min(sizes)
        others = [one.busbw(size) or 0.0 for one in like]
        usual, late = median(others), slow.busbw(size) or 0.0
        agree = [one for one in others if abs(one - usual) <= 0.03 * usual]
        if late >= _BEHIND * usual or len(agree) < max(_LIKE_RUNS, 0.6 * len(others)):
            continue
        return _of_the_slow(slow, runs, size, usual, text)
    return None


def _alike(one: ComparedRun, other: ComparedRun) -> bool:
    return one.settings == other.settings and one.case.ranks == other.case.ranks


def _of_the_slow(
    slow: ComparedRun, runs: Sequence[ComparedRun], size: int, usual: float, text: str
) -> Diagnosis:
    late = slow.busbw(size) or 0.0
    evidence = (
        f"{slow.title or 'one run'}: {late:.4g} GB/s at {quantity(size, 'B')}, {late / usual:.0%} of the "
        f"{usual:.4g} GB/s that others of the same kind reach",
    )
    found = _slow_link(slow, runs, size, evidence)
    down = link_states(text).down
    if slow.case.nodes > 1 and (down or abs(late / usual - 7 / 8) <= 0.02):
        said = (f"the text says: {down[:120]}",) if down else ()
        sentence = (
            found.sentence if down else f"{found.sentence} It has seven eighths: of 8 rails one is missing."
        )
        sure = "high" if down else "medium"
        return replace(
            found, cause="rail-down", sentence=sentence, evidence=(*evidence, *said), confidence=sure
        )
    return found


def _common_size(one: ComparedRun, other: ComparedRun) -> int | None:
    """The largest message of both, where it is large enough and the collective is the same."""
    if one.case.test is None or other.case.test is None or one.case.operation != other.case.operation:
        return None
    sizes = {row.size_bytes for row in one.case.test.rows} & {row.size_bytes for row in other.case.test.rows}
    most = max(sizes, default=0)
    return most if most >= 64 << 20 else None


def _due(fast: ComparedRun, slow: ComparedRun, size: int) -> float:
    """What share of the fast run's bandwidth the slow one should have for its number of ranks."""
    few, many = fast.case, slow.case
    if few.expected is not None and many.expected is not None:
        return min(1.0, many.expected.busbw(many.operation, size) / few.expected.busbw(few.operation, size))
    if few.operation == "all_to_all" and few.nodes > 1 and many.ranks and few.ranks:
        return min(1.0, _over_cards(many) / _over_cards(few))
    return 1.0


def _over_cards(case: NcclCase) -> float:
    """busbw of an all-to-all over one rank's bytes that leave its node."""
    ranks = case.ranks or 2
    return (ranks - 1) / max(1, ranks - case.per_node)


def _verdict(
    fast: ComparedRun, slow: ComparedRun, runs: Sequence[ComparedRun], size: int
) -> Diagnosis | None:
    few, many = fast.case.ranks or 0, slow.case.ranks or 0
    evidence = (
        f"{slow.title or 'one run'}: {slow.busbw(size):.4g} GB/s at {quantity(size, 'B')}",
        f"{fast.title or 'another'}: {fast.busbw(size):.4g} GB/s",
    )
    if _ALONE.search(fast.title) and _TOGETHER.search(slow.title):
        return _shared(
            "Each alone is fast, and together they are not: they share a PCIe link or switch.", evidence
        )
    if few == many:
        return _slow_link(slow, runs, size, evidence)
    if few > many:
        return None
    if fast.case.nodes > 1:
        return Diagnosis(
            "oversubscribed",
            f"{many} ranks reach much less than {few} do: what leaves the leaf or rack has too few uplinks.",
            evidence,
            (
                "compare the downlinks and uplinks of each leaf; run `cumulo network lint FABRIC`",
                "sort the host file by leaf, so that neighbours of a ring share one",
                PAUSES_STEP,
            ),
            "medium",
            many,
        )
    if slow.case.nodes == 1 and (fast.busbw(size) or 0.0) < MOST_PCIE:
        return _shared(
            f"{many} GPUs reach much less than {few} do: their path crosses sockets, or shares a PCIe link.",
            evidence,
        )
    return None


def _shared(sentence: str, evidence: tuple[str, ...]) -> Diagnosis:
    return Diagnosis(
        "shared-path",
        sentence,
        evidence,
        (TOPO_STEP, "run `lspci -tv`, and look for what hangs on one switch"),
        "medium",
    )


def _slow_link(
    slow: ComparedRun, runs: Sequence[ComparedRun], size: int, evidence: tuple[str, ...]
) -> Diagnosis:
    """Runs of the same ranks: what all slow ones have in their titles, and no fast one, is slow."""
    bound = 1.1 * (slow.busbw(size) or 0.0)
    slow_names = [set(_NAME.findall(one.title)) for one in runs if (one.busbw(size) or bound) < bound]
    fast_names = [set(_NAME.findall(one.title)) for one in runs if (one.busbw(size) or 0.0) >= bound]
    common = set.intersection(*slow_names) - set().union(*fast_names) if slow_names else set()
    who = ", ".join(sorted(common))
    named = f"Runs with {who} are slow, and others of the same kind are not."
    return Diagnosis(
        "slow-link",
        named if who else "One run is slower than its like.",
        evidence,
        (PORTS_STEP, WIDTH_STEP, PAIRS_STEP),
        "medium",
        slow.case.ranks,
    )  # fmt: skip
