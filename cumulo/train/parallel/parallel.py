"""ParallelRun: this rank's part of a model under a layout, and one step of it. The trainer owns one per process.

    run = ParallelRun(spec, config, Groups(config.layout, rank), device)
    loss = run.gradients(rows_of_this_rank, learnt_total, rows_total)     # the same number on every rank
    norm = run.step(share)

`__init__` is the order of the transformations: cut the model, fill it, choose who sums gradients, then who moves
weights. Whatever the layout, the numbers are those of one process, up to rounding.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from cumulo.layout.layout import Layout
from cumulo.layout.pieces import chunk_parts, is_adapter, pieces
from cumulo.layout.stages import chunks_per_stage, held_chunks, splits_backward, stage_placement
from cumulo.pipeline.decide.actions import Action, Kind, PipelineSchedule
from cumulo.pipeline.decide.catalog import build
from cumulo.pipeline.decide.check import check
from cumulo.pipeline.decide.communication import Sends, with_communication
from cumulo.pipeline.play.run import Wire, play
from cumulo.ranks.collectives import all_reduce
from cumulo.ranks.groups import Groups
from cumulo.ranks.point_to_point import Peers
from cumulo.spec.model import ModelSpec
from cumulo.spec.parameters import parameter_shapes
from cumulo.train.data.loader import DeviceBatch, to_device
from cumulo.train.data.packing import Batch
from cumulo.train.decide.adapters import adapter_shapes
from cumulo.train.decide.config import TrainConfig
from cumulo.train.model.arithmetic import ARITHMETICS
from cumulo.train.model.initialise import initialise
from cumulo.train.model.lora import add_adapters, initialise_adapter
from cumulo.train.model.model import TrainingDecoder, joins_operations
from cumulo.train.model.offload import offload_activations
from cumulo.train.model.split import split_for
from cumulo.train.optimizer.sharded_optimizer import ShardedOptimizer, gradient_sink
from cumulo.train.optimizer.sink import Shard
from cumulo.train.parallel.expert_balance import ExpertBalance
from cumulo.train.parallel.expert_bias import move_biases, take_loads
from cumulo.train.parallel.expert_parallel import ExpertParallel
from cumulo.train.run.step import StepLoss


class ParallelRun:
    def __init__(
        self,
        spec: ModelSpec,
        config: TrainConfig,
        groups: Groups,
        device: torch.device,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`start`: weights of a whole model to begin with; None: the new model of `config.seed`."""
        self.spec, self.config, self.groups, self.device = spec, config, groups, device
        self.layout = layout = groups.layout
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        shapes = parameter_shapes(spec)
        if config.lora is not None:
            shapes |= adapter_shapes(spec, config.lora)
        self.pieces = pieces(spec, layout, groups.rank, shapes)
        split, parts = split_for(layout, groups), chunk_parts(spec, layout)
        # Joined operations compute a weight's gradient with its input's; some schedules need the two apart.
        joins = (
            joins_operations(device, self.dtype, split) and not config.compile and not splits_backward(layout)
        )
        self.chunks = {
            chunk: TrainingDecoder(
                spec,
                self.dtype,
                "meta" if layout.zero >= 2 else device,  # of what is shared out, only the shares get memory
                recompute=config.recompute or config.recompute_operations,
                split=split,
                part=parts[chunk],
                arithmetic=ARITHMETICS[config.products],
                fused=joins,
            )
            for chunk, _ in held_chunks(layout, groups.place.pp)
        }
        for model in self.chunks.values():
            if config.lora is not None:
                add_adapters(model, config.lora)
            if config.compile:
                model.compile_layers()
        _share_parameters(self.chunks)
        if config.offload_activations:
            for chunk in self.chunks.values():
                offload_activations(chunk)
        self.sink = gradient_sink(self.chunks, self.pieces, groups, config.master_weights, device)
        self._fill(start)
        self.optimizer = ShardedOptimizer(self.sink, config.optimizer, spec, config.master_weights, groups)
        self.balance: ExpertBalance | None = None
        every = config.expert_rebalance_every_steps
        if every and spec.moe is not None and isinstance(split.experts, ExpertParallel):
            models = list(self.chunks.values())
            self.balance = ExpertBalance(models, self.optimizer, spec.moe, groups, split.experts, every)

    @property
    def shards(self) -> Mapping[str, Shard]:
        """What this rank's optimizer moves and a checkpoint keeps, by the parameter's name."""
        return self.sink.shards if self.balance is None else self.balance.placed(self.sink.shards)

    def gradients(self, batch: Batch, learnt_total: int, rows_total: int) -> StepLoss:
        """Leave the gradients of the whole batch's mean loss with the optimizer.

        `batch`: the rows of this rank's data-parallel place; the totals count the rows of all places, so that what
        ranks compute are parts of a sum.
        """
        layout, micro = self.layout, self.config.micro_batch
        micro_batches = self._cut(batch, micro)
        schedule = _training_schedule(layout, len(micro_batches))
        learnt_total = max(1, learnt_total)
        players = {
            number: _ChunkLoss(
                model, partial(self.sink.leaves, number), learnt_total, self.config.balance_loss / rows_total
            )
            for number, model in self.chunks.items()
        }
        self.sink.begin()
        self._play(schedule, players, micro_batches, micro)
        self.optimizer.take(self.sink.finish())
        token_sum, balance_sum = self._total(players)
        return StepLoss(token_sum / learnt_total, balance_sum / rows_total)

    def step(self, share: float) -> float:
        """Move the weights; returns the gradients' norm. `share` is the schedule's part of the learning rates."""
        norm = float(self.optimizer.clip())
        self.move(share)
        self.optimizer.zero_grad()
        return norm

    def move(self, share: float) -> str | None:
        """Move the weights by the gradients that are there, and by their load the experts' biases and places, which
        is news."""
        self.optimizer.step(share)
        rate, moe = self.config.expert_bias_rate, self.spec.moe
        steers = rate > 0 and moe is not None and moe.selection_bias
        if not steers and self.balance is None:
            return None
        models = list(self.chunks.values())
        loads = take_loads(models, self.groups)
        if steers:
            move_biases(models, rate, loads)
        return None if self.balance is None else self.balance.after_step(loads)

    @torch.no_grad()
    def token_sum(self, batch: Batch, micro: int) -> float:
        """Cross-entropy summed over the learnt tokens of all ranks' rows, without gradients."""
        micro_batches = self._cut(batch, micro)
        players = {
            number: _ChunkLoss(model, model.parameters, 1, 0.0) for number, model in self.chunks.items()
        }
        schedule = _forward_schedule(self.layout, len(micro_batches))
        self._play(schedule, players, micro_batches, micro)
        return self._total(players)[0]

    # -- parts -------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _fill(self, start: Mapping[str, Tensor] | None) -> None:
        """One whole parameter at a time: a rank needs memory for its own shares and for one that is whole."""
        for name, shard in self.sink.shards.items():
            if not shard.tensor.numel():
                continue
            if start is None or is_adapter(name):
                whole = torch.empty(shard.piece.whole, dtype=shard.dtype)
                if is_adapter(name):
                    initialise_adapter(name, whole, self.config.seed)
                else:
                    initialise({name: whole}, self.spec, self.config.seed)
            else:
                whole = start[name].to(shard.dtype)  # a master copy begins as the weight that it is of
            for box in shard.piece.cut_rows(shard.begin, shard.end):
                shard.tensor[box.held_slices].copy_(whole[box.whole_slices])
        self.sink.spread(frozen=True)

    def _cut(self, batch: Batch, micro: int) -> list[DeviceBatch]:
        return [
            to_device(batch.rows(first, first + micro), self.device)
            for first in range(0, len(batch.tokens), micro)
        ]

    def _play(
        self,
        schedule: PipelineSchedule,
        players: Mapping[int, "_ChunkLoss"],
        micro_batches: list[DeviceBatch],
        micro: int,
    ) -> None:
        layout = self.layout
        tokens = micro * micro_batches[0].tokens.shape[1] // layout.cp
        if layout.sequence_parallel:
            tokens //= layout.tp
        wire = Wire((tokens, self.spec.hidden), self.dtype, self.device)
        transport = Peers(self.groups.group("pp")) if layout.pp > 1 else None
        play(schedule, self.groups.place.pp, players, micro_batches, wire, transport, self.sink)

    def _total(self, players: Mapping[int, "_ChunkLoss"]) -> tuple[float, float]:
        """The sums of tokens' losses and of balances over all ranks; tensor-parallel ranks have the same ones."""
        own = sum((player.sums for player in players.values()), torch.zeros(2, dtype=torch.float64))
        if self.groups.place.tp > 0:
            own = torch.zeros_like(own)
        own = own.to(self.device)
        all_reduce(own, self.groups.group_of_several("world"))
        token_sum, balance_sum = own.tolist()
        return token_sum, balance_sum


class _ChunkLoss:
    """A chunk of the model as the pipeline plays it: its share of the objective, and sums to report."""

    def __init__(
        self,
        model: TrainingDecoder,
        leaves: Callable[[], Iterator[nn.Parameter]],
        learnt_total: int,
        balance_weight: float,
    ) -> None:
        """`leaves`: what backward gives gradients to; under ZeRO 3 the model itself has not got them then."""
        self.model, self.learnt_total, self.balance_weight = model, learnt_total, balance_weight
        self._leaves = leaves
        self._tokens: list[Tensor] = []
        self._balances: list[Tensor] = []

    def __call__(self, x: Tensor | None, micro_batch: DeviceBatch) -> tuple[Tensor | None, Tensor | None]:
        losses = self.model(micro_batch, x)
        objective = None
        if self.model.part.last:
            self._tokens.append(losses.token_sum.detach())
            objective = losses.token_sum / self.learnt_total
        if losses.balance_sum is not None:
            self._balances.append(losses.balance_sum.detach())
            share = losses.balance_sum * self.balance_weight
            objective = share if objective is None else objective + share
        return losses.hidden, objective

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._leaves()

    @property
    def sums(self) -> Tensor:
        """[tokens' losses, balances], in float64; waits for the device."""
        return torch.tensor(
            [
                float(torch.stack(parts).double().sum()) if parts else 0.0
                for parts in (self._tokens, self._balances)
            ],
            dtype=torch.float64,
        )


def _share_parameters(chunks: Mapping[int, nn.Module]) -> None:
    """Where two chunks of a rank have the same parameter (a tied embedding), it becomes one tensor."""
    found: dict[str, nn.Parameter] = {}
    for module in chunks.values():
        for name, parameter in list(module.named_parameters()):
            if found.setdefault(name, parameter) is not parameter:
                path, _, last = name.rpartition(".")
                setattr(module.get_submodule(path), last, found[name])


@lru_cache(maxsize=8)
def _training_schedule(layout: Layout, micro_batches: int) -> PipelineSchedule:
    if layout.pp == 1:
        return build("1f1b", 1, micro_batches)
    order = build(layout.schedule, layout.pp, micro_batches, layout.chunks_per_stage)
    # NCCL's sends wait for their receive; the order that allows for it begins receives early, which suits gloo, too
    schedule = with_communication(order, Sends.RENDEZVOUS)
    check(schedule, Sends.RENDEZVOUS)
    return schedule


@lru_cache(maxsize=8)
def _forward_schedule(layout: Layout, micro_batches: int) -> PipelineSchedule:
    """Every micro-batch through every chunk, in the direction all pipelines have."""
    orders = tuple(
        tuple(
            Action(Kind.FORWARD, micro_batch, chunk)
            for micro_batch in range(micro_batches)
            for chunk, direction in held_chunks(layout, stage)
            if direction == 0
        )
        for stage in range(layout.pp)
    )
    forward = PipelineSchedule(
        "forward only", layout.pp, micro_batches, chunks_per_stage(layout), stage_placement(layout), orders
    )
    return with_communication(forward, Sends.RENDEZVOUS)
