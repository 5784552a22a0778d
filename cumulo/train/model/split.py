"""Split: what a model does where it is cut over ranks. `TrainingDecoder` asks it at its borders and knows no more.

A split has three independent sides: matrices cut over tensor-parallel ranks, sequences over context-parallel ranks,
experts over expert-parallel ranks. `WHOLE` is the split into one part and costs nothing; `split_for` makes the one
of a layout.
"""

from dataclasses import dataclass

from cumulo.layout.layout import Layout
from cumulo.models.linear import TensorKind
from cumulo.ranks.groups import Groups
from cumulo.ranks.tensor_parallel import TensorParallel, WholeMatrices
from cumulo.train.model.arithmetic import Arithmetic
from cumulo.train.model.document_mask import WholeSequences
from cumulo.train.model.recompute import Recompute
from cumulo.train.parallel.context_parallel import ContextParallel
from cumulo.train.parallel.expert_parallel import AllExperts, ExpertParallel


@dataclass(frozen=True, slots=True)
class Split:
    tensor: WholeMatrices
    context: WholeSequences
    experts: AllExperts


WHOLE = Split(WholeMatrices(), WholeSequences(), AllExperts())


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """How all layers of a model are made."""

    kind: TensorKind
    split: Split = WHOLE
    recompute: Recompute = Recompute()
    fused: Arithmetic | None = None  # of operations joined as a GPU likes them; None: they are not


def split_for(layout: Layout, groups: Groups) -> Split:
    """The split of a layout as this rank sees it."""
    tensor, context, experts = WHOLE.tensor, WHOLE.context, WHOLE.experts
    if layout.tp > 1:
        tensor = TensorParallel(groups.group("tp"), layout.sequence_parallel)
    if layout.cp > 1:
        ring = groups.group("ring") if layout.cp > layout.ulysses else None
        context = ContextParallel(
            groups.group("cp"), ring, groups.group("ulysses") if layout.ulysses > 1 else None
        )
    if layout.ep > 1:
        experts = ExpertParallel(groups.group("ep"))
    return Split(tensor, context, experts)
