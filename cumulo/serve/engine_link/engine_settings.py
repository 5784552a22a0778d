"""EngineSettings: what an engine process is started with, and how several of one fleet share the machine."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cumulo.base.machine import gpus_here
from cumulo.base.report import available_cores
from cumulo.engine.config import EngineConfig
from cumulo.serve.adapter_registry import AdapterRegistry

State = Literal["starting", "ready", "restarting", "unloaded", "stopped"]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    stall_timeout_s: float = 60.0  # has work, finishes no step for this long: dead
    start_timeout_s: float = 900.0
    log_level: str = "info"
    name: str = ""  # of the replica, in messages; empty: it is the only one
    environment: Mapping[str, str] = field(default_factory=dict)  # of its process, beside this one's
    for_router: bool = False
    adapters: AdapterRegistry = field(
        default_factory=lambda: AdapterRegistry(0)
    )  # that an engine begins with

    @property
    def who(self) -> str:
        """The engine, in messages."""
        return f"the engine process of replica {self.name}" if self.name else "the engine process"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why an engine is replaced. `planned`: somebody asked for it, and no request is to blame."""

    words: str
    planned: bool = False


def settings_of_replica(settings: EngineSettings, name: str, number: int, replicas: int) -> EngineSettings:
    """CPU threads are divided among the replicas unless their number is given; GPUs are dealt out in turn, as
    many to each as it has ranks."""
    config, environment = settings.config, dict(settings.environment)
    if config.threads is None:
        config = dataclasses.replace(config, threads=max(1, available_cores() // replicas))
    gpus, ranks = gpus_here() if config.device != "cpu" else [], config.layout.world
    if gpus:
        own = [gpus[(number * ranks + rank) % len(gpus)] for rank in range(min(ranks, len(gpus)))]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return dataclasses.replace(settings, config=config, environment=environment, name=name, for_router=True)
