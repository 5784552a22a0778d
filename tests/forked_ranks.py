"""What the ranks of tests are forked with. A worker has one process that forks them, made by whichever file starts
ranks first; without this, ranks of all other files would import torch's compiler, FSDP and the rest again, two CPU
seconds each."""

from collections.abc import Sequence
from multiprocessing import forkserver

MODULES = (
    "hypothesis",
    "pytest",
    "torch._dynamo",  # which optimizers import
    "cumulo.engine.play.rank_player",
    "cumulo.models.files.load",
    "cumulo.models.play.cuda_decoder",
    "cumulo.pipeline.play",
    "cumulo.train.run.trainer",
    "cumulo.train.run.verify",
    "tests.quick_triton",
)
_set = forkserver.set_forkserver_preload


def _set_all(modules: Sequence[str]) -> None:
    _set([*modules, *MODULES])


def prepare() -> None:
    forkserver.set_forkserver_preload = _set_all
