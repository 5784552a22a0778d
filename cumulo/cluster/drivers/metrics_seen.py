"""MetricsWatch: what an autoscaling rule sees of replicas that others keep, from their /metrics. Used by the Ray
keeper and by KEDA's external scaler.

    watch = MetricsWatch(Slo(ttft_s=2.0))
    watch.seen({"http://10.0.0.7:8000": text}, starting=1)    # RoleSeen: what came since the last time
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from cumulo.errors import ConfigError
from cumulo.fleet.decide.autoscale_settings import parse_autoscale
from cumulo.fleet.decide.forecast_rule import ForecastRule
from cumulo.fleet.decide.scaling import ReplicaSpeed, RoleSeen
from cumulo.spec.slo import Slo

_ENDED, _PROMPTS, _OUTPUTS = "request_success_total", "prompt_tokens_total", "generation_tokens_total"
_RUNNING, _WAITING, _AT_GATEWAY = "num_requests_running", "num_requests_waiting", "gateway_in_flight"
_HISTOGRAMS = {  # of requests, by the bound of an SLO that they are compared with
    "ttft": "time_to_first_token_seconds",
    "itl": "request_inter_token_latency_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2e": "e2e_request_latency_seconds",
}


_USUAL_START_UP_S, USUAL_SLO = 60.0, Slo(ttft_s=2.0)


def forecast_rule(text: str) -> tuple[ForecastRule, Slo]:
    """The rule that a text in the words of `cumulo serve --autoscale` names, and the SLO that it keeps."""
    settings = parse_autoscale(text)
    if settings.prompt_tok_s is None or settings.output_tok_s is None:
        raise ConfigError(
            "the rule needs prompt-tok-s and output-tok-s: what a replica serves within the SLO; "
            "`cumulo simulate autoscale` prints them"
        )
    speed, slo = ReplicaSpeed(settings.prompt_tok_s, settings.output_tok_s), settings.slo or USUAL_SLO
    return settings.rule(speed, _USUAL_START_UP_S, slo), slo


@dataclass(slots=True)
class ReplicaCounters:
    """The counters of one replica since it started, summed over labels."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # cumulative, by upper bound

    def total(self, name: str) -> float:
        return self.values.get(name, 0.0)

    def within(self, name: str, bound_s: float) -> tuple[float, float]:
        """Observations within a bound, straight between two buckets; and all of them."""
        buckets = self.buckets.get(name, {})
        total = max(buckets.values(), default=0.0)
        low_s = low = 0.0
        for upper_s, count in sorted(buckets.items()):
            if upper_s >= bound_s:
                share = 1.0 if upper_s == bound_s else (bound_s - low_s) / (upper_s - low_s)
                return low + (count - low) * share, total
            low_s, low = upper_s, count
        return low, total


def read_counters(text: str) -> ReplicaCounters:
    found = ReplicaCounters()
    for sample in (one for family in text_string_to_metric_families(text) for one in family.samples):
        name = sample.name.removeprefix("cumulo:")
        if "le" in sample.labels:
            buckets = found.buckets.setdefault(name.removesuffix("_bucket"), {})
            upper_s = float(sample.labels["le"])
            buckets[upper_s] = buckets.get(upper_s, 0.0) + sample.value
        else:
            found.values[name] = found.values.get(name, 0.0) + sample.value
    return found


@dataclass(slots=True)
class MetricsWatch:
    slo: Slo
    _before: dict[str, ReplicaCounters] = field(default_factory=dict)  # by replica
    _in_flight: float = 0.0  # at the look before
    _ended: float = 0.0  # in all
    _prompt_tokens: float = 0.0
    _output_tokens: float = 0.0

    def seen(self, texts: Mapping[str, str], starting: int = 0, gateway: str = "") -> RoleSeen:
        """`texts`: /metrics of each replica that answers; `gateway`: that of the gateway before them, where
        requests wait that no replica has."""
        now = {name: read_counters(text) for name, text in texts.items()}
        ended, prompts, outputs = (self._since(now, name) for name in (_ENDED, _PROMPTS, _OUTPUTS))
        self._ended += ended
        self._prompt_tokens += prompts
        self._output_tokens += outputs
        running, waiting = (sum(one.total(name) for one in now.values()) for name in (_RUNNING, _WAITING))
        if gateway:
            waiting += max(0.0, read_counters(gateway).total(_AT_GATEWAY) - running - waiting)
        in_flight = running + waiting
        arrived = max(0.0, ended + in_flight - self._in_flight)
        mean_prompt = self._prompt_tokens / self._ended if self._ended else 0.0
        # Histograms do not say which requests kept all bounds: it is the smallest share of the bounds.
        kept = self.slo.most_kept(lambda bound, bound_s: self._share_within(now, _HISTOGRAMS[bound], bound_s))
        self._before, self._in_flight = self._before | now, in_flight
        return RoleSeen(
            ready=len(now),
            starting=starting,
            arrived=round(arrived),
            arrived_prompt_tokens=round(arrived * mean_prompt),
            waiting=round(waiting),
            waiting_prompt_tokens=round(waiting * mean_prompt),
            running=round(running),
            mean_output_tokens=self._output_tokens / self._ended if self._ended else 0.0,
            busy=sum(one.total(_RUNNING) > 0 for one in now.values()) / max(1, len(now)),
            ended=round(ended),
            ended_in_slo=round(ended * kept),
        )

    def _since(self, now: Mapping[str, ReplicaCounters], name: str) -> float:
        """Growth of a counter. One that is smaller than before belongs to a replica that was started again."""
        total = 0.0
        for replica, one in now.items():
            before = self._before[replica].total(name) if replica in self._before else 0.0
            total += one.total(name) - (before if before <= one.total(name) else 0.0)
        return total

    def _share_within(self, now: Mapping[str, ReplicaCounters], name: str, bound_s: float) -> float:
        """The share of the requests since the look before whose time is within a bound."""
        kept = total = 0.0
        for replica, one in now.items():
            before = self._before.get(replica, ReplicaCounters())
            within, every = one.within(name, bound_s)
            within_before, every_before = before.within(name, bound_s)
            if every < every_before:  # it was started again
                within_before = every_before = 0.0
            kept += within - within_before
            total += every - every_before
        return min(1.0, max(0.0, kept / total)) if total else 1.0
