"""What a flight recorder's dump or a watchdog's message says. `diagnose` calls it."""

from cumulo.plan.diagnose.diagnosis import LOG_STEP, Diagnosis
from cumulo.plan.diagnose.flight_text import Hang


def hang_verdict(hang: Hang) -> Diagnosis:
    if hang.collective == "none":
        return _in_step(hang)
    who = ", ".join(str(rank) for rank in hang.missing)
    waiting = "1 rank waits" if len(hang.waiting) == 1 else f"{len(hang.waiting) or 'the other'} ranks wait"
    evidence = [f"{waiting} in {hang.collective} number {hang.sequence}"]
    if hang.where:
        evidence.append(f"called at {hang.where}")
    if hang.differ:
        return Diagnosis(
            "mismatched-calls", f"{hang.differ[0].upper()}{hang.differ[1:]}.", tuple(evidence),
            ("make all ranks take the same branch before this collective",), "high",
        )  # fmt: skip
    if hang.joined and hang.missing:
        return Diagnosis(
            "unknown", f"Rank {who} has not come to {hang.collective} number {hang.sequence} yet, and the "
            "others wait less than a second for it: that is usual while a job runs.", tuple(evidence),
            ("take the dumps again after a few seconds: if the number is the same, it hangs",), "low",
        )  # fmt: skip
    if hang.joined:
        return Diagnosis(
            "unknown", f"All {hang.ranks} ranks came to {hang.collective} number {hang.sequence}, and it has not "
            "ended: it runs just now, or the network or a GPU holds it up.", tuple(evidence),
            ("take the dumps again after a few seconds: if the number is the same, it hangs", LOG_STEP), "low",
        )  # fmt: skip
    if not hang.missing:
        return Diagnosis(
            "late-rank", "Ranks wait in a collective, and the text does not say which rank is missing.",
            tuple(evidence), ("collect the dumps of all ranks: TORCH_NCCL_DUMP_ON_TIMEOUT=1",), "medium",
        )  # fmt: skip
    return Diagnosis(
        "late-rank",
        f"Rank {who} did not come to {hang.collective} number {hang.sequence}.{hang.slow}",
        tuple(evidence),
        (f"look at rank {who} with `py-spy dump`: data loading, a crash, or another branch of the program",),
        "high",
    )


def _in_step(hang: Hang) -> Diagnosis:
    if hang.slow:
        return Diagnosis(
            "late-rank",
            f"Nothing hangs, but ranks are not in step: {hang.slow}.",
            (f"{hang.ranks} ranks ended the same collectives",),
            ("look at that rank's data loading, GPU clock and temperature",),
            "medium",
        )
    if hang.ranks < max(2, hang.world):
        return Diagnosis(
            "unknown", "The dumps of some ranks are not here; these ended all their collectives.", (),
            ("collect the dumps of all ranks: TORCH_NCCL_DUMP_ON_TIMEOUT=1",), "low",
        )  # fmt: skip
    return Diagnosis(
        "healthy",
        f"All {hang.ranks} ranks {'came to' if hang.joined else 'ended'} the same collectives: nothing hangs, and "
        "none is late.",
        (),
        (LOG_STEP,),
        "medium",
    )
