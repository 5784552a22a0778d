"""What part of the machine a replica gets: its CPU threads and its GPU. Asked by Fleet for each replica."""

import dataclasses
import os

from cumulo.base.machine import gpus_here
from cumulo.serve.engine_link.engine_supervisor import EngineSettings


def settings_of_replica(settings: EngineSettings, name: str, number: int, replicas: int) -> EngineSettings:
    """CPU threads are divided among the replicas unless their number is given; GPUs are dealt out in turn, as
    many to each as it has ranks."""
    config, environment = settings.config, dict(settings.environment)
    if config.threads is None:
        config = dataclasses.replace(config, threads=max(1, len(os.sched_getaffinity(0)) // replicas))
    gpus, ranks = gpus_here() if config.device != "cpu" else [], config.layout.world
    if gpus:
        own = [gpus[(number * ranks + rank) % len(gpus)] for rank in range(min(ranks, len(gpus)))]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return dataclasses.replace(settings, config=config, environment=environment, name=name, for_router=True)
