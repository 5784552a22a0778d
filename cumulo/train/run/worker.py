"""One rank of a training run: joins the others, trains, and says by its exit code what became of it.

Started by `cumulo train` (through `launch.py`) or by a `torchrun` of one's own; it learns its rank from torchrun's
environment. More or fewer ranks than the layout has (a node died, or came back) change its data parallelism; a rank
that is left over ends at once.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from cumulo.ranks.groups import Groups
from cumulo.ranks.team import Team
from cumulo.train.decide.config import TrainConfig
from cumulo.train.decide.elastic import fitted
from cumulo.train.run.trainer import Ranks, Trainer, TrainResult, Watcher

_CHECKPOINT_TIMEOUT = timedelta(hours=6)  # data is prepared, and large files are hashed, while others wait


def run_worker(config: TrainConfig, resume: bool, watcher: Watcher | None) -> TrainResult | None:
    """Train as the rank that the environment says; None: there is nothing to do for it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = replace(config, layout=fitted(config, world))
    if rank >= config.layout.world:
        return None
    with joined(config, rank) as ranks:
        again = ranks.team.first(lambda: _began_before(Path(config.folder)))
        return Trainer(config, resume=resume or again, watcher=watcher, ranks=ranks).run()


def _began_before(folder: Path) -> bool:
    """Whether this job's ranks were started earlier, and died or were joined by others. Called by one of them."""
    job, mark = os.environ.get("TORCHELASTIC_RUN_ID", "none"), folder / "job"
    known = job != "none" and mark.is_file() and mark.read_text("utf-8") == job
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(job, "utf-8")
    return known or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def lost_another(error: BaseException) -> bool:
    """Whether it is what a rank sees of the death of another: not worth a traceback of its own."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        word in text for word in ("gloo", "nccl", "connection", "broken pipe", "store")
    )


@contextmanager
def joined(config: TrainConfig, rank: int) -> Iterator[Ranks]:
    """The process groups of a run, until it ends; a run that fails leaves them to the end of its process."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The watch for hangs speaks first: it knows more than a timeout says.
    patience = timedelta(seconds=2 * config.faults.hang_after_s + 60)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method="env://",
        rank=rank,
        world_size=config.layout.world,
        timeout=patience,
    )
    groups = Groups(config.layout, rank)
    yield Ranks(groups, Team(dist.new_group(backend="gloo", timeout=_CHECKPOINT_TIMEOUT)))
    dist.destroy_process_group()
