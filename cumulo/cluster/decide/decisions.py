"""What a policy decides, each with the reason a person reads. Simulator and drivers carry the decisions of one
moment out together: what is evicted or resized stops first, then everything starts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from cumulo.cluster.decide.jobs import TaskPlace


@dataclass(frozen=True, slots=True)
class JobPlacement:
    """Start this waiting gang: one place for each task."""

    job_id: str
    places: tuple[TaskPlace, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Stop this running gang; it waits again, from its last checkpoint."""

    job_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Resize:
    """Give this running gang these places instead of its own: more tasks, fewer, or as many elsewhere (a
    move)."""

    job_id: str
    places: tuple[TaskPlace, ...]
    reason: str = ""


class Waits(NamedTuple):  # made by the million: as a tuple it takes a third of the time
    """This job is not placed, and why. `until_s`: when the policy expects to start it, if it reserved a start."""

    job_id: str
    reason: str
    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cordon:
    """Give this node no more tasks."""

    node: str
    reason: str = ""


Decision = JobPlacement | Eviction | Resize | Waits | Cordon


def untold_reason(decided: Sequence[Decision]) -> str:
    """Why a job waits of which a decision says nothing: the policy did not come to it."""
    waits = (one.job_id for one in decided if isinstance(one, Waits))
    starts = (one.job_id for one in decided if isinstance(one, JobPlacement))
    ahead = next(itertools.chain(waits, starts), None)
    return f"waits behind {ahead}" if ahead else "others run in its place, and the policy stops none of them"


def plain(decision: Decision) -> dict[str, Any]:
    """The decision as a dictionary, for logs."""
    fields = decision._asdict() if isinstance(decision, Waits) else asdict(decision)
    return {"kind": type(decision).__name__, **fields}
