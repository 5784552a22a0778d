"""Diagnosis: the answer of `cumulo diagnose`; the causes it knows with what to run next, the verdicts of signs,
and the messages that name a cause. All three are tables in data/causes.yaml."""

import re
from dataclasses import dataclass
from typing import Any, Literal

from cumulo.base.strict import package_yaml
from cumulo.diagnose.plain_text import line_of


def table(name: str) -> Any:
    """The content of a file in data/."""
    return package_yaml("cumulo.diagnose", f"data/{name}")


# Watch: only note it. Cordon: the node gets no more tasks. Drain: its jobs leave it, too, after a checkpoint.
NodeAct = Literal["ignore", "watch", "cordon", "drain"]


@dataclass(frozen=True, slots=True)
class Cause:
    title: str
    next_steps: tuple[str, ...]


CAUSES = {
    name: Cause(entry["title"], tuple(entry["next_steps"]))
    for name, entry in table("causes.yaml")["causes"].items()
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cause: str  # a key of CAUSES
    sentence: str
    evidence: tuple[str, ...] = ()
    confidence: str = "high"  # high, medium, low
    more_steps: tuple[str, ...] = ()  # what to run before the steps of the cause
    ranks: int | None = None
    share: float | None = None  # measured over expected bus bandwidth
    node: NodeAct = "ignore"  # what a scheduler should do with the node whose text it is

    @property
    def title(self) -> str:
        return CAUSES[self.cause].title

    @property
    def next_steps(self) -> tuple[str, ...]:
        return (*self.more_steps, *CAUSES[self.cause].next_steps)


def verdict(named: str, *evidence: str, confidence: str = "", **words: Any) -> Diagnosis:
    """A verdict of data/causes.yaml, with `words` in the places of {names}, and evidence beside its own."""
    entry = table("causes.yaml")["verdicts"][named]
    own = (entry["evidence"].format(**words),) if "evidence" in entry else ()
    steps = tuple(step.format(**words) for step in entry.get("more_steps", ()))
    confidence = confidence or entry.get("confidence", "high")
    said, act = entry["sentence"].format(**words), entry.get("node", "ignore")
    return Diagnosis(entry["cause"], said, (*own, *evidence), confidence, steps, node=act)


def message_verdict(text: str, measured: bool) -> Diagnosis | None:
    """What a message says with which a run ends or a driver reports a fault. `measured`: there are bandwidths, so
    that only what names a part counts, and no general error."""
    for one in table("causes.yaml")["messages"]:
        names_part = one.get("with_numbers", False)
        if (names_part or not measured) and (found := re.search(one["pattern"], text)):
            confidence = "low" if one["cause"] == "unknown" else "high" if names_part else "medium"
            evidence, steps = (f"the text says: {line_of(found)}",), tuple(one.get("steps", ()))
            act = one.get("node", "ignore")
            return Diagnosis(one["cause"], one["sentence"], evidence, confidence, steps, node=act)
    return None
