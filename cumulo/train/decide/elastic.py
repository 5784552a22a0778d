"""Which layout a run has on more or fewer ranks than it was made for. Pure; `worker.py` asks after every start.

Only data parallelism gives way: the other axes cut the model, and a rank that held a slice cannot be done without.
The batch stays the same, so that the loss does; samples are numbered globally, so that none is lost or repeated.
"""

from dataclasses import replace

from cumulo.errors import ConfigError
from cumulo.layout.layout import Layout
from cumulo.train.decide.config import TrainConfig


def fitted(config: TrainConfig, world: int) -> Layout:
    """The configuration's layout on at most `world` ranks: as many copies as the batch can be shared out among."""
    layout = config.layout
    if layout.world == world:
        return layout
    one_copy = layout.world // layout.dp
    dp = world // one_copy
    while dp > 0 and config.batch_sequences % (dp * config.micro_batch):
        dp -= 1
    if dp < 1:
        raise ConfigError(
            f"layout {layout} needs {one_copy} processes at least (tp {layout.tp} × pp {layout.pp} × cp "
            f"{layout.cp}), and {world} were started; change the layout or the number of processes"
        )
    ep, shard = layout.ep, layout.shard
    while (dp * layout.cp) % ep:
        ep -= 1
    return replace(layout, dp=dp, ep=ep, shard=shard if shard is None or dp % shard == 0 else None)
