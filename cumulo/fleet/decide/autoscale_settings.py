"""AutoscaleSettings: what `cumulo serve --autoscale` is told, as text: how many replicas, and how eagerly.

parse_autoscale("0..3,idle=60s")    # scale to zero after a minute without a request
parse_autoscale("1..4,prefill=1..2,devices=5")    # prefill and decode apart, five engines at most
"""

import re
from dataclasses import dataclass

from cumulo.base.nearest import did_you_mean
from cumulo.base.quantities import parse_duration_s
from cumulo.errors import ConfigError
from cumulo.fleet.decide.forecast_rule import ForecastRule
from cumulo.fleet.decide.scaling import ReplicaSpeed, ScalingLimits
from cumulo.spec.slo import Slo

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_RATE = re.compile(r"\d+(?:\.\d+)?")
_TIMES = ("interval", "idle", "cooldown", "start-up", "ttft", "itl", "tpot", "e2e")
_RATES = ("prompt-tok-s", "output-tok-s")
_NAMES = (*_TIMES, *_RATES, "prefill", "devices")


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
    match = _RANGE.fullmatch(first)
    if match is None:
        raise ConfigError(
            f"--autoscale begins with the fewest and the most replicas, as in 1..4; got {first!r}"
        )
    times: dict[str, float] = {}
    prefill: ScalingLimits | None = None
    devices: int | None = None
    for part in rest:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _NAMES:
            known = did_you_mean(name, _NAMES)
            raise ConfigError(f"--autoscale has no setting {name}{known}; write it as in 1..4,interval=5s")
        if name == "prefill":
            bounds_of = _RANGE.fullmatch(value)
            if bounds_of is None:
                raise ConfigError(f"--autoscale prefill must be a range such as 1..2, got {value!r}")
            prefill = ScalingLimits(int(bounds_of[1]), int(bounds_of[2]))
        elif name == "devices":
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(f"--autoscale devices must be a number of engines, got {value!r}")
            devices = int(value)
        else:
            times[name] = _number(name, value)
    bounds = {f"{name}_s": times[name] for name in ("ttft", "itl", "tpot", "e2e") if name in times}
    return AutoscaleSettings(
        ScalingLimits(int(match[1]), int(match[2])),
        interval_s=times.get("interval", 5.0),
        idle_s=times.get("idle", 300.0),
        cooldown_s=times.get("cooldown"),
        start_up_s=times.get("start-up"),
        slo=Slo(**bounds) if bounds else None,
        prompt_tok_s=times.get("prompt-tok-s"),
        output_tok_s=times.get("output-tok-s"),
        prefill=prefill,
        most_devices=devices,
    )


def _number(name: str, value: str) -> float:
    what, wanted = f"--autoscale {name}", "be a time such as 500ms, 10s or 5m"
    if name in _RATES:
        wanted = "be a number of tokens per second"
        found = float(value) if _RATE.fullmatch(value) else 0.0
    else:
        found = parse_duration_s(value, what, wanted)
    if found <= 0:
        raise ConfigError(f"{what} must {wanted}, got {value!r}")
    return found
