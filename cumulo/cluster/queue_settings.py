"""How a target's queue decides: its policy, the quotas of tenants, and the cores that jobs may take. They are kept
in the store; `cumulo launch` sets them, and the queue asks at every turn."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cumulo.base.files import write_whole
from cumulo.base.strict import build
from cumulo.cluster.decide.policies import policy_named
from cumulo.cluster.decide.quotas import read_quota
from cumulo.cluster.decide.snapshot import TenantQuota
from cumulo.cluster.job_store import JobStore, Target
from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class QueueSettings:
    policy: str = "fifo"
    quota: Mapping[str, str] = field(default_factory=dict)  # by tenant, as --quota takes them
    slots: int | None = None  # cores of this machine; None: all

    @property
    def quotas(self) -> list[TenantQuota]:
        return [read_quota(text) for text in self.quota.values()]


def queue_settings(store: JobStore, target: Target) -> QueueSettings:
    path = store.folder / f"{target}.json"
    found = json.loads(path.read_text("utf-8")) if path.exists() else {}
    settings: QueueSettings = build(QueueSettings, found if isinstance(found, dict) else {}, str(path))
    return settings


def set_slots(store: JobStore, slots: int) -> None:
    """Cores that jobs may take together; more than there are share them."""
    if slots < 1:
        raise ConfigError(f"--slots must be 1 or more, got {slots}")
    _change(store, "local", slots=slots)


def set_policy(store: JobStore, name: str, target: Target = "local") -> None:
    policy_named(name)
    path, colon, function = name.rpartition(":")
    _change(store, target, policy=f"{Path(path).absolute()}:{function}" if colon else name)


def set_quotas(store: JobStore, quotas: list[str], target: Target = "local") -> None:
    """Each replaces what the tenant had; TENANT=none takes it away."""
    kept = dict(queue_settings(store, target).quota)
    for text in quotas:
        tenant = text.partition("=")[0]
        if text == f"{tenant}=none":
            kept.pop(tenant, None)
        else:
            kept[read_quota(text).tenant] = text
    _change(store, target, quota=kept)


def _change(store: JobStore, target: Target, **facts: Any) -> None:
    with store.locked():
        changed = replace(queue_settings(store, target), **facts)
        write_whole(store.folder / f"{target}.json", json.dumps(asdict(changed)).encode())
