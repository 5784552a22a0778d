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

from cumulo.ranks.collectives import use_collectives
from cumulo.ranks.groups import Groups, control_group
from cumulo.ranks.start import join_ranks
from cumulo.ranks.team import Team
from cumulo.train.decide.config import TrainConfig
from cumulo.train.decide.elastic import fitted
from cumulo.train.run.trainer import Ranks, RunWatcher, Trainer, TrainResult

_PATIENCE_S = 600.0  # with others, where nothing else says when a rank hangs
_CHECKPOINT_TIMEOUT = timedelta(hours=6)  # data is prepared, and large files are hashed, while others wait


def run_worker(config: TrainConfig, resume: bool, watcher: RunWatcher | None) -> TrainResult | None:
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


@contextmanager
def joined(config: TrainConfig, rank: int) -> Iterator[Ranks]:
    """The process groups of a run, until it ends; a run that fails leaves them to the end of its process."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # The watch for hangs speaks first: it knows more than a timeout says.
    patience = timedelta(seconds=2 * (config.faults.hang_after_s or _PATIENCE_S) + 60)
    with join_ranks(rank, config.layout.world, patience, gpu=on_gpu):
        use_collectives(config.collective, config.collective_profile)
        yield Ranks(Groups(config.layout, rank), Team(control_group(_CHECKPOINT_TIMEOUT)))
