"""ExpertBalance: between steps, experts move to where their measured load evens out the ranks. Owned by the run.

Only where experts lie changes: routers, numbers of experts and so checkpoints are what they are in one process. An
expert moves with its optimizer state. All ranks know the loads of all layers, so each works out the same places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from cumulo.layout.expert_placement import heaviest_share, place_experts
from cumulo.layout.layout import Axis
from cumulo.layout.pieces import Box, Piece, zero_rows
from cumulo.ranks.collectives import all_reduce, all_to_all
from cumulo.ranks.groups import Group, Groups
from cumulo.spec.model import MoESpec
from cumulo.train.model.experts import TrainingMixture
from cumulo.train.model.model import TrainingDecoder
from cumulo.train.optimizer.sharded_optimizer import ShardedOptimizer
from cumulo.train.optimizer.sink import Shard
from cumulo.train.parallel.expert_parallel import ExpertParallel

Rows = Sequence[Sequence[int]]  # by rank of a group: which expert each of its rows is


@torch.no_grad()
def exchange_rows(
    tensors: Sequence[Tensor], before: Rows, after: Rows, group: Group, device: torch.device
) -> None:
    """In place: row n of each tensor is of expert `before[own][n]` and becomes of expert `after[own][n]`.

    Every rank of the group calls it with the same two; a rank without rows may have no tensors. `device`: whose
    memory the group can send from, wherever the tensors are.
    """
    rank = group.rank()
    own, wanted = list(before[rank]), after[rank]
    leaving = [[own.index(expert) for expert in theirs if expert in own] for theirs in after]
    arriving = [[expert for expert in wanted if expert in theirs] for theirs in before]
    came = {expert: row for row, expert in enumerate(expert for experts in arriving for expert in experts)}
    tensors = tensors if own else []
    parts = [_bytes(tensor.to(device)) for tensor in tensors]
    index = _index([row for rows in leaving for row in rows], device)
    sent = torch.cat(parts, 1)[index] if parts else torch.empty((0, 1), dtype=torch.uint8, device=device)
    received = sent.new_empty(len(wanted), sent.shape[1])
    all_to_all(received, sent, group, [len(experts) for experts in arriving], [len(rows) for rows in leaving])
    in_order, begin = received[_index([came[expert] for expert in wanted], device)], 0
    for tensor, part in zip(tensors, parts, strict=True):
        end = begin + part.shape[1]
        tensor.copy_(in_order[:, begin:end].contiguous().view(tensor.dtype).view(tensor.shape))
        begin = end


def _index(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    """[rows, bytes of a row]."""
    return tensor.detach().reshape(len(tensor), -1).contiguous().view(torch.uint8)


LEAST_GAIN = 0.05  # of the busiest rank's load in units of the mean: less is not worth a move


class ExpertBalance:
    def __init__(
        self,
        models: Sequence[TrainingDecoder],
        optimizer: ShardedOptimizer,
        moe: MoESpec,
        groups: Groups,
        split: ExpertParallel,
        every_steps: int,
    ) -> None:
        self._optimizer, self._moe, self._groups, self._split = optimizer, moe, groups, split
        self._every_steps, self._steps = every_steps, 0
        self._device = next(iter(optimizer.sink.shards.values())).tensor.device
        self._loads: Tensor | None = None
        self._experts: dict[int, nn.Module] = {
            int(number): layer.ffn.experts
            for model in models
            for number, layer in model.layers.items()
            if isinstance(layer.ffn, TrainingMixture)
        }
        self.orders = {layer: tuple(range(moe.experts)) for layer in self._experts}

    def after_step(self, loads: Tensor) -> str | None:
        """`loads`: [layers, experts] of the step, over all ranks. If experts moved, what there is to say of it."""
        self._loads = loads if self._loads is None else self._loads + loads
        self._steps += 1
        if self._steps % self._every_steps:
            return None
        measured, self._loads = self._loads.tolist(), None
        before = dict(self.orders)
        self.place({layer: self._better(measured[layer], order) for layer, order in before.items()})
        moved = [layer for layer, order in before.items() if order != self.orders[layer]]
        if not moved:
            return None
        was, is_now = (
            max(heaviest_share(measured[layer], orders[layer], self._split.size) for layer in moved)
            for orders in (before, self.orders)
        )
        where = " of this stage" if self._groups.layout.pp > 1 else ""
        return (
            f"experts moved in {len(moved)} of {len(before)} layers{where}: the busiest rank had {was:.2f} times "
            f"the mean load, and would have had {is_now:.2f}"
        )

    def place(self, orders: Mapping[int, tuple[int, ...]]) -> None:
        """Give each layer's ranks their runs of an order of its experts."""
        changed = {layer: order for layer, order in orders.items() if order != self.orders[layer]}
        if not changed:
            return
        shards, state = self._optimizer.sink.shards, self._optimizer.state()
        for layer, order in sorted(changed.items()):
            names = sorted(name for name in shards if name.startswith(f"layers.{layer}.ffn.experts."))
            rows = [shards[name].tensor.detach() for name in names]
            rows += [
                state[slot]
                for slot in sorted(state)
                if slot.rpartition(".")[0] in names and state[slot].ndim  # a count of steps is that of all
            ]
            group, before, after = self._rows(self.orders[layer], order)
            exchange_rows(rows, before, after, group, self._device)
            self._split.place(self._experts[layer], torch.tensor(order, device=self._device))
            self.orders[layer] = order
        self._optimizer.loaded()

    def placed(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Shards as they are with the experts where they are now."""
        return {name: replace(shard, piece=self._piece(shard.piece)) for name, shard in shards.items()}

    def _better(self, loads: Sequence[float], order: tuple[int, ...]) -> tuple[int, ...]:
        ranks, groups = self._split.size, self._moe.groups
        if groups % ranks and ranks % groups:
            groups = 1  # they cannot stay together
        found = place_experts(loads, ranks, groups)
        gain = heaviest_share(loads, order, ranks) - heaviest_share(loads, found, ranks)
        return found if gain > LEAST_GAIN else order

    def _rows(
        self, old: Sequence[int], new: Sequence[int]
    ) -> tuple[Group, list[Sequence[int]], list[Sequence[int]]]:
        """Who exchanges rows, and which experts they have before and after."""
        groups, ranks = self._groups, self._split.size
        count = self._moe.experts // ranks
        if not groups.layout.zero:
            runs = [slice(rank * count, (rank + 1) * count) for rank in range(ranks)]
            return groups.group("ep"), [old[run] for run in runs], [new[run] for run in runs]
        sharers = groups.size("expert_data")
        runs = []
        for place in range(groups.size("data")):  # neighbours have other experts; then ZeRO shares them out
            begin, end = zero_rows(count, sharers, place // ranks)
            first = place % ranks * count
            runs.append(slice(first + begin, first + end))
        return groups.group("data"), [old[run] for run in runs], [new[run] for run in runs]

    def _piece(self, piece: Piece) -> Piece:
        if not piece.expert:
            return piece
        order = self.orders[int(piece.name.split(".")[1])]
        first = self._groups.index("ep") * piece.shape[0]
        boxes = tuple(
            Box((expert, *box.offset[1:]), (1, *box.size[1:]), (row, *box.at[1:]))
            for box in piece.boxes
            for row, expert in enumerate(order[first : first + piece.shape[0]])
        )
        return replace(piece, boxes=boxes)


# Balance without a loss: the routers' selection biases move against the experts' load. Called after each step.
#
# An expert that was chosen more often than the mean of its layer becomes a little less attractive, one that was
# chosen less often a little more (Wang et al. 2024; DeepSeek-V3, section 2.1.2). Loads are those of the whole
# batch, so that all ranks move their copies alike.
def steer_selection_biases(models: Sequence[TrainingDecoder], rate: float, groups: Groups | None) -> None:
    """`models`: this rank's chunks, whose loads since the last time are used up; `groups`: None in one process."""
    moe = models[0].spec.moe
    if moe is not None and moe.selection_bias:
        move_biases(models, rate, take_loads(models, groups))


def take_loads(models: Sequence[TrainingDecoder], groups: Groups | None) -> Tensor:
    """How often each expert was chosen since the last time, by all ranks' tokens: [layers, experts]."""
    spec = models[0].spec
    experts = 0 if spec.moe is None else spec.moe.experts
    device = next(models[0].parameters()).device
    loads = torch.zeros(spec.layers, experts, dtype=torch.float64, device=device)
    for model in models:
        for layer, load in model.take_loads().items():
            loads[layer] += load
    # Stages too: in a bidirectional pipeline two of them have the same layers and other micro-batches.
    axes: tuple[Axis, ...] = ("pp", "dp")
    for axis in axes:
        if groups is not None:
            all_reduce(loads, groups.group_of_several(axis))
    return loads


@torch.no_grad()
def move_biases(models: Sequence[TrainingDecoder], rate: float, loads: Tensor) -> None:
    steps = rate * (loads.mean(1, keepdim=True) - loads).sign()
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("selection_bias"):
                parameter.add_(steps[int(name.split(".")[1])])
