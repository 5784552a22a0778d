"""What an autoscaling rule sees of a fleet, and what it answers. Filled by the simulator, by `cumulo serve
--autoscale` and by the Ray driver; a rule reads nothing else, so it decides alike in all of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RoleSeen:
    """One role's replicas (`both`, `prefill` or `decode`) at a moment, and what came since the look before."""

    ready: int
    starting: int = 0  # ordered, and not serving yet
    arrived: int = 0  # requests since the look before
    arrived_prompt_tokens: int = 0
    waiting: int = 0  # requests without a first token now, those that no replica has taken included
    waiting_prompt_tokens: int = 0  # not computed yet
    running: int = 0  # requests that have a first token
    mean_output_tokens: float = 0.0  # of answers that ended so far; 0: none has
    busy: float = 0.0  # share of the time since the look before in which a ready replica had work, 0 to 1
    ended: int = 0  # requests since the look before
    ended_in_slo: int = 0

    @property
    def replicas(self) -> int:
        return self.ready + self.starting

    @property
    def requests(self) -> int:
        return self.waiting + self.running


@dataclass(frozen=True, slots=True)
class FleetSeen:
    now_s: float
    roles: Mapping[str, RoleSeen]


@dataclass(frozen=True, slots=True)
class ScaleTo:
    """How many replicas a role should have, starting ones included."""

    role: str
    replicas: int
    why: str


class ScalingRule(Protocol):
    @property
    def interval_s(self) -> float:
        """How often it wants to look."""
        ...

    def decide(self, seen: FleetSeen) -> list[ScaleTo]:
        """One answer for each role. Looks come in order of time."""
        ...


@dataclass(frozen=True, slots=True)
class ReplicaSpeed:
    """What one replica serves within the SLO when prompts and answers come mixed: the work of a request, in seconds
    of a replica, is its prompt over `prompt_tok_s` plus its answer over `output_tok_s`."""

    prompt_tok_s: float
    output_tok_s: float
    # How many times as much it does when it is saturated, and requests wait. Replicas together need less slack than
    # each alone.
    saturated: float = 1.0
    decode_saturated: float | None = None  # the same of a replica that only decodes; None: as the others

    def at_most(self, role: str) -> float:
        """By how much a saturated replica of this role does more."""
        return self.decode_saturated or self.saturated if role == "decode" else self.saturated

    def work_s(self, role: str, prompt_tokens: float, output_tokens: float) -> float:
        prompt_s = 0.0 if role == "decode" else prompt_tokens / self.prompt_tok_s
        output_s = 0.0 if role == "prefill" else output_tokens / self.output_tok_s
        return prompt_s + output_s

    def needed(self, load: float, role: str = "both") -> float:
        """Replicas for a load, in seconds of a saturated replica per second: the load, and slack that grows with
        its root (Halfin and Whitt 1981), so that one replica alone serves what it does within the SLO."""
        alone = 1.0 / self.at_most(role)
        return load + (1.0 - alone) * math.sqrt(load / alone)
