"""Which replica of a pool gets a request, whether one that fails is asked again, and which servers may join."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cumulo.engine.decide.routing import Ask, ReplicaView, Route, Router, router, usable

_USUAL_PROMPT_TOK_S, _USUAL_STEP_S = 1_000.0, 0.02  # before any replica has measured them


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a replica computes prompts and steps, as it has measured."""

    prompt_tok_s: float = 0.0  # 0: it has not measured it yet
    step_s: float = 0.0  # of a step that only decodes; 0: not measured yet


def usual_pace(paces: Iterable[Pace]) -> Pace:
    """What is assumed of a replica that has measured nothing: it is like the fastest of the others."""
    known = list(paces)
    return Pace(
        max((one.prompt_tok_s for one in known), default=0.0) or _USUAL_PROMPT_TOK_S,
        min((one.step_s for one in known if one.step_s), default=_USUAL_STEP_S),
    )


@dataclass(slots=True)
class Chooser:
    """Which replica of a pool gets a request. One per pool.

    Replicas of different weights form groups: a canary has a share of the requests, exactly and in turn. Within the
    group the router decides, as inside one server and in the simulator.
    """

    policy: str
    _routers: dict[float, Router] = field(default_factory=dict)  # by weight: its group's
    _credit: dict[float, float] = field(default_factory=dict)  # what each group is owed

    def choose(self, ask: Ask, replicas: Sequence[ReplicaView], weights: Mapping[str, float]) -> Route:
        """Raises NoReplica where none takes it."""
        groups: dict[float, list[ReplicaView]] = {}
        for one in usable(ask, replicas):
            groups.setdefault(weights.get(one.name, 1.0), []).append(one)
        groups = {weight: members for weight, members in groups.items() if weight > 0} or groups
        weight = next(iter(groups)) if len(groups) == 1 else self._next_group(groups)
        if weight not in self._routers:
            self._routers[weight] = router(self.policy)
        route = self._routers[weight].route(ask, groups[weight])
        if len(groups) == 1:
            return route
        share = weight * len(groups[weight]) / sum(one * len(members) for one, members in groups.items())
        turn = f"the turn of weight {weight:g}, which has {share:.0%} of the requests"
        return replace(route, why=f"{turn}; there {route.why}")

    def forget(self, replica: str) -> None:
        """It is gone, or has lost its cache."""
        for one in self._routers.values():
            one.forget(replica)

    def _next_group(self, groups: Mapping[float, Sequence[ReplicaView]]) -> float:
        """Smooth weighted round-robin: each group is owed its share, the one owed most is next."""
        total = 0.0
        for weight, members in groups.items():
            share = weight * len(members)
            self._credit[weight] = self._credit.get(weight, 0.0) + share
            total += share
        chosen = max(groups, key=lambda weight: self._credit[weight])
        self._credit[chosen] -= total
        return chosen


State = Literal["closed", "open", "half open"]
_LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class Breaker:
    """Whether a replica that fails is asked again. One per replica.

    Closed: requests go there. After `most_failures` in a row it opens: none go there for a pause, which doubles
    each time up to a bound. Then it is half open: one request may try, and closes or opens it again.
    """

    most_failures: int = 3
    pause_s: float = 1.0
    failures: int = 0  # in a row
    opened: int = 0  # times, in a row
    opened_s: float | None = None  # when it opened last; None: closed
    trying: bool = False  # half open, and the one request is on its way
    reason: str = ""  # of the last failure

    def state(self, now_s: float) -> State:
        if self.opened_s is None:
            return "closed"
        pause_s = min(_LONGEST_PAUSE_S, self.pause_s * 2.0 ** max(0, min(self.opened, 10) - 1))
        return "half open" if now_s - self.opened_s >= pause_s else "open"

    def refuses(self, now_s: float) -> str:
        """Why no request goes there now; empty: one may."""
        state = self.state(now_s)
        if state == "closed" or (state == "half open" and not self.trying):
            return ""
        return f"failed {self.failures} times in a row ({self.reason})"

    def on_sent(self, now_s: float) -> None:
        self.trying = self.state(now_s) == "half open"

    def on_no_outcome(self) -> None:
        """Its client left, or it was full: that says nothing, and another may try."""
        self.trying = False

    def on_success(self) -> None:
        self.failures = self.opened = 0
        self.opened_s, self.trying, self.reason = None, False, ""

    def on_failure(self, now_s: float, reason: str) -> None:
        self.failures += 1
        self.reason = reason
        if self.trying or (self.opened_s is None and self.failures >= self.most_failures):
            self.opened += 1
            self.opened_s = now_s
        self.trying = False


@dataclass(frozen=True, slots=True)
class Told:
    """What a server said of itself. Of servers other than Cumulo's only the models are known."""

    models: tuple[str, ...]
    version: str = ""
    tokenizer: str = ""


def refusal(
    url: str, wanted: str | None, told: Told, own_version: str, others: Iterable[tuple[str, Told]]
) -> str:
    """Why a server may not be a replica of a pool, and what would work; empty if it may. `wanted`: the pool's
    model, where one was named. `others`: the replicas there are."""
    if told.version and told.version != own_version:
        return f"{url} runs Cumulo {told.version} and this gateway {own_version}: install the same version on both"
    if not told.models:
        return f"{url} serves no model: /v1/models lists none"
    if wanted is not None and wanted not in told.models:
        return (
            f"{url} serves {_names(told.models)}, not {wanted!r}: give it a pool of its own "
            f"(--pool {told.models[0]}={url}), or start it with --name {wanted}"
        )
    for other_url, other in others:
        same = [name for name in told.models if name in other.models and (wanted is None or name == wanted)]
        if same and told.tokenizer and other.tokenizer and told.tokenizer != other.tokenizer:
            return (
                f"{url} and {other_url} both call their model {same[0]!r}, but their tokenizers differ: they are "
                "different models; start one of them with another --name"
            )
    return ""


def stray(url: str, told: Told, others: Sequence[tuple[str, Told]]) -> str:
    """Servers given without a pool should be of one model. Empty if this one has a model of the others."""
    if not others or any(set(told.models) & set(other.models) for _, other in others):
        return ""
    other_url, other = others[0]
    return (
        f"{url} serves {_names(told.models)} and {other_url} serves {_names(other.models)}: replicas have "
        f"the same model; for several models use --pool {other.models[0]}={other_url} "
        f"--pool {told.models[0]}={url}"
    )


def _names(models: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in models[:5]) + (", …" if len(models) > 5 else "")
