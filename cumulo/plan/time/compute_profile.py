"""Profiles: which constants hold for a device, a number format and a software: measured by themselves
(`profiles.yaml`, files of `cumulo calibrate`), or put together from physics and traits (`efficiency`)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.base.strict import package_yaml, read_yaml
from cumulo.errors import ConfigError
from cumulo.plan.job import DTYPE_BYTES
from cumulo.plan.time.efficiency import GENERATIONS, Profile, composed, shipped_efficiency
from cumulo.spec.device import Device

__all__ = ["Profile", "Profiles", "profile_from", "shipped", "shipped_for"]


@dataclass(frozen=True)
class Profiles:
    """All known profiles, and which is meant where only a device and a number format are named."""

    known: Mapping[str, Profile]
    current: Mapping[str, str]  # generation of devices -> software that "current" stands for

    @staticmethod
    def load(*files: Path) -> "Profiles":
        """What ships with the package, and the files that `cumulo calibrate` wrote on top."""
        content = package_yaml("cumulo.plan", "data/profiles.yaml")
        made = _composed()
        known, current = made | _profiles(content, "profiles.yaml", made), dict(content["current"])
        for path in files:
            extra = read_yaml(path, "the profile")
            if not isinstance(extra, Mapping) or "profiles" not in extra:
                raise ConfigError(f"{path} has no table `profiles`; write one with: cumulo calibrate")
            known |= _profiles({"profiles": {**content["profiles"], **extra["profiles"]}}, str(path), made)
            current |= extra.get("current") or {}
        return Profiles(known, current)

    def named(self, name: str) -> Profile:
        if name not in self.known:
            raise ConfigError(f"there is no profile {name!r}{did_you_mean(name, self.known, otherwise='')}")
        return self.known[name]

    def find(self, device: Device, dtype: str, software: str = "current") -> tuple[Profile, tuple[str, ...]]:
        """The profile for a device, and in what it was taken from elsewhere."""
        best = self.known[self.name_for(device, dtype, software)]
        if best.software in shipped_efficiency().software:
            made = composed(shipped_efficiency().software[best.software], device.generation, dtype, device)
            if device.generation in GENERATIONS:
                return made, ()
            return made, (f"no published rows of {device.generation} devices: shares of newer ones are used",)
        borrowed = []
        if _device_distance(best, device) > 1:
            borrowed.append(f"no profile for {device.generation} devices: that of {best.devices} is used")
        if _dtype_distance(best.dtype, dtype):
            borrowed.append(f"no profile for {dtype} products: that of {best.dtype} is used")
        return replace(best, dtype=dtype) if best.dtype != dtype else best, tuple(borrowed)

    def name_for(self, device: Device, dtype: str, software: str = "current") -> str:
        """The profile of a software that is nearest to a number format, then to a device."""
        if software == "current":
            software = self.current.get(device.generation, self.current["other"])
        able = [name for name, profile in self.known.items() if profile.software == software]
        if not able:
            names = sorted({profile.software for profile in self.known.values()})
            hint = did_you_mean(software, names, otherwise=".")
            raise ConfigError(
                f"there is no profile of the software {software!r}{hint} There are: {', '.join(names)}"
            )

        def distance(name: str) -> tuple[bool, int, int]:
            profile = self.known[name]
            other_kind = (profile.devices == "cpu") != (device.generation == "cpu")
            return other_kind, _dtype_distance(profile.dtype, dtype), _device_distance(profile, device)

        return min(able, key=distance)


@cache
def shipped() -> Profiles:
    return Profiles.load()


@lru_cache(256)
def shipped_for(device: Device, dtype: str, software: str) -> tuple[Profile, tuple[str, ...]]:
    """`shipped().find`, remembered: a search asks it for every layout."""
    return shipped().find(device, dtype, software)


def _device_distance(profile: Profile, device: Device) -> int:
    return 0 if profile.devices == device.name else 1 if profile.devices == device.generation else 2


def _dtype_distance(one: str, other: str) -> int:
    """16-bit formats run alike."""
    return abs(DTYPE_BYTES.get(one, 2) - DTYPE_BYTES.get(other, 2))


@cache
def _composed() -> dict[str, Profile]:
    """By software and generation of devices, in 16 and in 8 bits; `find` adds what a single device differs in."""
    found = {}
    for name, software in shipped_efficiency().software.items():
        for generation in GENERATIONS:
            found[f"{name}-{generation}"] = composed(software, generation, "bfloat16")
            if generation != "ampere":
                found[f"{name}-{generation}-fp8"] = composed(software, generation, "float8")
    return found


def _profiles(content: Mapping[str, Any], where: str, made: Mapping[str, Profile]) -> dict[str, Profile]:
    """An entry may name another as its `base`, one of the composed ones too, and give only what differs."""
    entries: Mapping[str, Mapping[str, Any]] = content["profiles"]

    def resolved(name: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
        if name in made and name not in entries:
            return asdict(made[name])
        if name not in entries or name in seen:
            raise ConfigError(f"{where}: profile {(*seen, name)[0]!r} is based on {name!r}, which cannot be")
        entry = dict(entries[name])
        base = entry.pop("base", None)
        return {**(resolved(base, (*seen, name)) if base else {}), **entry}

    return {name: profile_from(resolved(name), f"{where}: profile {name}") for name in entries}


def profile_from(entry: Mapping[str, Any], where: str) -> Profile:
    known = {field.name: field.type for field in fields(Profile)}
    if unknown := sorted(set(entry) - set(known)):
        raise ConfigError(f"{where} has unknown constants: {', '.join(unknown)}")
    if missing := sorted(set(known) - set(entry)):
        raise ConfigError(f"{where} lacks: {', '.join(missing)}; give them, or a `base` that has them")
    try:
        values: dict[str, Any] = {
            name: float(value) if known[name] is float else value for name, value in entry.items()
        }
        return Profile(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
