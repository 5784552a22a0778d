"""Mistakes in NCCL's settings: an environment file against the fabric it is for, by the rules of
data/nccl_settings.yaml."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from cumulo.base.nearest import nearest
from cumulo.base.strict import build
from cumulo.diagnose.diagnosis import table
from cumulo.diagnose.lint import Finding, Severity
from cumulo.spec.cluster import Fabric

_LINE = re.compile(
    r"^\s*(?:export\s+|ENV\s+|-x\s+|-\s+)?([A-Z][A-Z0-9_]*)\s*[=:]\s*[\"']?([^\"'#\n]*)[\"']?", re.MULTILINE
)


def settings_of(text: str) -> dict[str, str]:
    return {name: value.strip() for name, value in _LINE.findall(text)}


@dataclass(frozen=True, slots=True)
class SettingRule:
    """An entry of data/nccl_settings.yaml, which says what the fields mean."""

    names: tuple[str, ...]
    what: str
    gain: str
    change: str = ""
    rule: str = "nccl-setting"
    severity: Severity = "warning"
    cause: str = ""
    bad: tuple[str, ...] = ()
    below: int = 0
    matches: str = ""
    transport: str = ""
    fabric: str = ""
    usual: str = ""
    unless: str = ""

    def finding(self, given: Mapping[str, str]) -> Finding | None:
        """What is wrong with these settings, whatever the fabric."""
        name = next((name for name in self.names if name in given), self.names[0])
        value = given.get(name, self.usual)
        is_bad = (
            value.strip(".") in self.bad
            or (value.isdigit() and int(value) < self.below)
            or (self.matches and re.match(self.matches, value))
        )
        other, _, off = self.unless.partition("=")
        if not value or not is_bad or (other and given.get(other) == off):
            return None
        shown = f"{name}={value}" if name in given else f"{name} is not set"
        change = (self.change or f"remove {name}").format(value=value)
        what = self.what.format(shown=shown, value=value)
        return Finding(self.severity, self.rule, what, change, self.gain)


@cache
def setting_rules() -> tuple[SettingRule, ...]:
    rules = table("nccl_settings.yaml")["rules"]
    return tuple(build(SettingRule, one, f"the rule of {one['names']}") for one in rules)


def slow_settings(given: Mapping[str, str]) -> list[tuple[SettingRule, Finding]]:
    """Settings that explain a slow run."""
    return [(one, found) for one in setting_rules() if one.cause and (found := one.finding(given))]


def lint_settings(given: Mapping[str, str], fabric: Fabric) -> Iterator[Finding]:
    for one in setting_rules():
        fits = one.transport in ("", fabric.transport) and one.fabric in ("", fabric.kind)
        if fits and (found := one.finding(given)):
            yield found
    known = [f"NCCL_{name}" for name in table("nccl_settings.yaml")["known"].split()]
    for name in given:
        if name.startswith("NCCL_") and name not in known and (close := nearest(name, known)):
            what = f"{name} is no setting of NCCL that this lint knows."
            change = f"did you mean {close[0]}?"
            yield Finding("warning", "nccl-name", what, change, "the setting takes effect")
