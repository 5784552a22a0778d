"""What part of the machine a replica gets: its CPU threads and its GPU. Asked by Fleet for each replica."""

import dataclasses
import os
from pathlib import Path

from cumulo.serve.engine_link.engine_client import EngineSettings


def settings_of_replica(settings: EngineSettings, name: str, number: int, replicas: int) -> EngineSettings:
    """CPU threads are divided among the replicas unless their number is given; GPUs are dealt out in turn."""
    config, environment = settings.config, dict(settings.environment)
    if config.threads is None:
        config = dataclasses.replace(config, threads=max(1, len(os.sched_getaffinity(0)) // replicas))
    gpus = _gpus() if config.device != "cpu" else []
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    return dataclasses.replace(settings, config=config, environment=environment, name=name, for_router=True)


def _gpus() -> list[str]:
    """Those that this process may use, as CUDA names them."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [one.strip() for one in allowed.split(",") if one.strip()]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted((number for number in found if number.isdecimal()), key=int)
