"""Jobs as a person types them: NAME:gpus=0-511,collective=all_reduce,size=1GiB. `cumulo simulate network`
calls it."""

from dataclasses import dataclass

from cumulo.base.nearest import did_you_mean
from cumulo.base.quantities import parse_bytes, parse_duration_s
from cumulo.errors import ConfigError

_KEYS = ("gpus", "collective", "algorithm", "size", "start", "background")


@dataclass(frozen=True, slots=True)
class TypedJob:
    name: str
    first: int
    last: int
    collective: str
    algorithm: str
    size_bytes: float
    start_s: float
    background: bool


def parse_job(text: str, collective: str, algorithm: str, size: str) -> TypedJob:
    """What is not typed is taken from the command's own options."""
    name, _, rest = text.partition(":")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in _KEYS or not equals:
            raise ConfigError(
                f"job {name!r} has no setting {key!r}{did_you_mean(key, _KEYS)}; there are {_KEYS}"
            )
        given[key] = value
    if "gpus" not in given:
        raise ConfigError(f"job {name!r} must say which GPUs it has, as in {name}:gpus=0-511")
    first, _, last = given["gpus"].partition("-")
    if not first.isdigit() or not (last or first).isdigit():
        raise ConfigError(f"job {name!r}: gpus must look like 0-511, got {given['gpus']!r}")
    return TypedJob(
        name,
        int(first),
        int(last or first),
        given.get("collective", collective),
        given.get("algorithm", algorithm),
        parse_bytes(given.get("size", size)),
        parse_duration_s(given.get("start", "0s"), "a time", "look like 500us, 2ms or 1s"),
        given.get("background", "no").lower() in ("yes", "true", "1"),
    )
