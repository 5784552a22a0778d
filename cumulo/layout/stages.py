"""Stages and chunks of a layout's pipeline: how many chunks a model has, which layers are in each, and which stage
holds which. Trainer and planner ask. Pure."""

from functools import lru_cache

from cumulo.layout.layout import Layout
from cumulo.pipeline.decide.actions import StagePlacement
from cumulo.pipeline.decide.catalog import family


def stage_placement(layout: Layout) -> StagePlacement:
    return family(layout.schedule).placement if layout.pp > 1 else StagePlacement.LOOP


def chunks_per_stage(layout: Layout) -> int:
    """Chunks whose weights a stage holds."""
    if layout.pp == 1:
        return 1
    return layout.chunks_per_stage or family(layout.schedule).chunks_per_stage


def pipeline_chunks(layout: Layout) -> int:
    """Chunks a micro-batch passes."""
    return stage_placement(layout).chunks(layout.pp, chunks_per_stage(layout))


def is_bidirectional(layout: Layout) -> bool:
    """Whether stages hold two copies of the model, which micro-batches enter at opposite ends."""
    return layout.pp > 1 and family(layout.schedule).bidirectional


def splits_backward(layout: Layout) -> bool:
    """Whether the pipeline computes gradients of weights apart from those of inputs."""
    return layout.pp > 1 and family(layout.schedule).splits_backward


@lru_cache(maxsize=1024)
def held_chunks(layout: Layout, stage: int) -> tuple[tuple[int, int], ...]:
    """(chunk, direction) pairs that a stage holds; direction 1 is the second copy of a bidirectional pipeline."""
    return stage_placement(layout).held_by(stage, layout.pp, chunks_per_stage(layout))


@lru_cache(maxsize=4096)
def split_layers(layers: int, chunks: int, head_layers: float | None = None) -> tuple[int, ...]:
    """Layers of each chunk, as even as can be: those left over go to the chunks right before the last.

    `head_layers`: how many layers the head takes as long as; the last chunk, which has it, gets fewer of them.
    """
    if chunks == 1:
        return (layers,)
    last = layers // chunks
    if head_layers is not None:
        last = max(1, round((layers + head_layers) / chunks - head_layers))
    each, more = divmod(layers - last, chunks - 1)
    longer = range(more) if head_layers is not None else range(chunks - 1 - more, chunks - 1)
    return (*(each + (chunk in longer) for chunk in range(chunks - 1)), last)
