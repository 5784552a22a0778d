"""What published systems chose, by name: `cumulo plan train MODEL --like deepseek-v3`."""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ConfigError


@cache
def systems() -> Mapping[str, Mapping[str, Any]]:
    """Choices named as the command's options are, `layout` as --fixed takes it, and `source`."""
    text = (resources.files("cumulo.plan") / "data" / "systems.yaml").read_text("utf-8")
    found: Mapping[str, Mapping[str, Any]] = yaml.safe_load(text)
    return found


def system_named(name: str) -> Mapping[str, Any]:
    if name not in systems():
        hint = did_you_mean(name, systems(), quoted=True, otherwise=".")
        raise ConfigError(f"--like does not know {name!r}{hint} It knows: {', '.join(systems())}")
    return systems()[name]
