"""AutoscaleSettings: what `cumulo serve --autoscale` is told, as text: how many replicas, and how eagerly.

parse_autoscale("0..3,idle=60s")    # scale to zero after a minute without a request
parse_autoscale("1..4,prefill=1..2,devices=5")    # prefill and decode apart, five engines at most
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.base.quantities import parse_count, parse_duration_s, parse_number
from cumulo.errors import ConfigError
from cumulo.fleet.decide.forecast_rule import ForecastRule
from cumulo.fleet.decide.scaling import ReplicaSpeed, ScalingLimits
from cumulo.spec.slo import Slo


@dataclass(frozen=True, slots=True)
class AutoscaleSettings:
    limits: ScalingLimits
    interval_s: float = 5.0
    idle_s: float = 300.0  # without a request, before the last replica goes
    cooldown_s: float | None = None  # None: twice the start-up time
    start_up_s: float | None = None  # of a replica; None: as measured
    slo: Slo | None = None  # None: what the server promises, or a TTFT of 2 s
    prompt_tok_s: float | None = None  # of one replica within the SLO; None: as measured
    output_tok_s: float | None = None
    prefill: ScalingLimits | None = None  # of prefill engines; None: as many as at the start
    most_devices: int | None = None  # engines of all roles together

    def rule(
        self, speed: ReplicaSpeed, start_up_s: float, slo: Slo, limits: ScalingLimits | None = None
    ) -> ForecastRule:
        """`limits`: of another role than the replicas'."""
        told = self.prompt_tok_s is not None and self.output_tok_s is not None
        return ForecastRule(
            ReplicaSpeed(
                self.prompt_tok_s or speed.prompt_tok_s,
                self.output_tok_s or speed.output_tok_s,
                1.0 if told else speed.saturated,
                None if told else speed.decode_saturated,
            ),
            start_up_s if self.start_up_s is None else self.start_up_s,
            slo if self.slo is None else self.slo,
            limits or self.limits,
            interval_s=self.interval_s,
            cooldown_s=self.cooldown_s,
            idle_s=self.idle_s,
        )


def parse_autoscale(text: str) -> AutoscaleSettings:
    first, *rest = (part.strip() for part in text.split(","))
    found: dict[str, Any] = {
        "limits": _limits(first, "--autoscale begins with the fewest and the most replicas: it")
    }
    bounds: dict[str, float] = {}
    for part in rest:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in (*_SETTINGS, *_BOUNDS):
            known = did_you_mean(name, (*_SETTINGS, *_BOUNDS))
            raise ConfigError(f"--autoscale has no setting {name}{known}; write it as in 1..4,interval=5s")
        what = f"--autoscale {name}"
        if name in _BOUNDS:
            bounds[f"{name}_s"] = _seconds(value, what)
        else:
            field, read = _SETTINGS[name]
            found[field] = read(value, what)
    return AutoscaleSettings(**found, slo=Slo(**bounds) if bounds else None)


def _limits(text: str, what: str) -> ScalingLimits:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{what} must be a range such as 1..4, got {text!r}")
    return ScalingLimits(int(match[1]), int(match[2]))


def _seconds(text: str, what: str) -> float:
    wanted = "be a time such as 500ms, 10s or 5m"
    found = parse_duration_s(text, what, wanted)
    if found <= 0:
        raise ConfigError(f"{what} must {wanted}, got {text!r}")
    return found


def _rate(text: str, what: str) -> float:
    return parse_number(text, what, more_than=True)


_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_BOUNDS = ("ttft", "itl", "tpot", "e2e")
_SETTINGS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {  # by name: the field, and how it is read
    "interval": ("interval_s", _seconds),
    "idle": ("idle_s", _seconds),
    "cooldown": ("cooldown_s", _seconds),
    "start-up": ("start_up_s", _seconds),
    "prompt-tok-s": ("prompt_tok_s", _rate),
    "output-tok-s": ("output_tok_s", _rate),
    "prefill": ("prefill", _limits),
    "devices": ("most_devices", parse_count),
}
