"""What the ranks of tests are forked with. A worker has one process that forks them, made by whichever file starts
ranks first; without this, ranks of all other files would import torch's compiler, FSDP and the rest again, two CPU
seconds each. That process is itself forked from the one that forks servers (`tests.warm`)."""

from collections.abc import Sequence
from multiprocessing import forkserver, util

from tests import warm

MODULES = (
    "hypothesis",
    "pytest",
    "torch._dynamo",  # which optimizers import
    "torch.utils.tensorboard",  # in which a run's first rank writes
    "cumulo.engine.play.rank_player",
    "cumulo.models.files.load",
    "cumulo.models.play.cuda_decoder",
    "cumulo.pipeline.play",
    "cumulo.train.run.trainer",
    "cumulo.train.run.verify",
    "tests.quick_triton",
)
_set = forkserver.set_forkserver_preload
_spawn = util.spawnv_passfds


def _set_all(modules: Sequence[str]) -> None:
    _set([*modules, *MODULES])


def _spawn_quickly(path: bytes, args: Sequence[str], passfds: Sequence[int]) -> int:
    code = args[-1]
    return (
        warm.start_code(code, passfds)
        if "multiprocessing.forkserver" in code
        else _spawn(path, args, passfds)
    )


def prepare() -> None:
    forkserver.set_forkserver_preload = _set_all
    util.spawnv_passfds = _spawn_quickly
