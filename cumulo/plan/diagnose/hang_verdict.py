"""What a flight recorder's dump or a watchdog's message says. `diagnose` calls it."""

from cumulo.plan.diagnose.diagnosis import LOG_STEP, Diagnosis
from cumulo.plan.diagnose.flight_text import Hang


def hang_verdict(hang: Hang) -> Diagnosis:
    if hang.collective == "none":
        return Diagnosis(
            "unknown", "All ranks ended the same collectives; nothing hangs.", (), (LOG_STEP,), "medium"
        )
    who = ", ".join(str(rank) for rank in hang.missing)
    evidence = [f"{len(hang.waiting) or 'the other'} ranks wait in {hang.collective} number {hang.sequence}"]
    if hang.where:
        evidence.append(f"called at {hang.where}")
    if hang.differ:
        return Diagnosis(
            "late-rank", f"{hang.differ[0].upper()}{hang.differ[1:]}.", tuple(evidence),
            ("make all ranks take the same branch before this collective",), "high",
        )  # fmt: skip
    if not hang.missing:
        return Diagnosis(
            "late-rank", "Ranks wait in a collective, and the text does not say which rank is missing.",
            tuple(evidence), ("collect the dumps of all ranks: TORCH_NCCL_DUMP_ON_TIMEOUT=1",), "medium",
        )  # fmt: skip
    return Diagnosis(
        "late-rank",
        f"Rank {who} did not come to {hang.collective} number {hang.sequence}.",
        tuple(evidence),
        (f"look at rank {who} with `py-spy dump`: data loading, a crash, or another branch of the program",),
        "high",
    )
