"""Policies by name, as `cumulo launch --policy` and `cumulo simulate cluster --policy` take them, or a user's own:
one Python function of the snapshot, `my_policy.py:choose`."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from cumulo.base.nearest import did_you_mean
from cumulo.cluster.decide.fifo import fifo
from cumulo.cluster.decide.snapshot import Policy
from cumulo.errors import ConfigError

POLICIES: dict[str, Policy] = {"fifo": fifo}


class _ByName(dict[str, Policy]):
    """Also a user's own, by file and function."""

    def __missing__(self, name: str) -> Policy:
        return policy_of(name)


def policies_by_name() -> Mapping[str, Policy]:
    return _ByName(POLICIES)


def policy_of(name: str) -> Policy:
    if name in POLICIES:
        return POLICIES[name]
    path, colon, function = name.rpartition(":")
    if not colon:
        raise ConfigError(
            f"there is no policy {name!r}{did_you_mean(name, POLICIES)}; or give FILE.py:FUNCTION"
        )
    return _own(Path(path), function)


def _own(path: Path, function: str) -> Policy:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"there is no Python file {path} with a policy")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"{path} has no function {function!r}")
    return found  # type: ignore[no-any-return]
