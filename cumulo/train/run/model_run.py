"""ModelRun: this rank's part of a model under a layout, and one step of it. The trainer owns one per process.

    run = ModelRun(spec, config, Groups(config.layout, rank), device)
    loss = run.gradients(rows_of_this_rank, loss_tokens)     # the same number on every rank
    norm = run.clip()
    run.step(share)

`__init__` is the order of the transformations: cut the model, fill it, choose who sums gradients, then who moves
weights. Whatever the layout, the numbers are those of one process, up to rounding; one process is a layout of one
rank, which sends nothing and copies nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from cumulo.checkpoint.play.boxes import read_parts, stored_shapes
from cumulo.checkpoint.play.held import Held, all_parts, held_whole
from cumulo.checkpoint.play.store import Checkpoint
from cumulo.layout.layout import held_chunks, splits_backward
from cumulo.layout.pieces import adapter_shapes, chunk_parts, is_adapter, pieces
from cumulo.pipeline.decide.actions import PipelineSchedule
from cumulo.pipeline.play.run import Wire, play
from cumulo.ranks.collectives import Peers, all_reduce
from cumulo.ranks.groups import Groups, SecondLane
from cumulo.spec.counting import parameter_shapes
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import IGNORED, Batch, DeviceBatch, Packing, to_device
from cumulo.train.decide.config import TrainConfig
from cumulo.train.model.arithmetic import ARITHMETICS
from cumulo.train.model.lora import add_adapters, initialise_adapter
from cumulo.train.model.model import TrainingDecoder, initialise, joins_operations
from cumulo.train.model.offload import offload_activations
from cumulo.train.model.split import split_for
from cumulo.train.optimizer.sharded_optimizer import ShardedOptimizer, gradient_sink
from cumulo.train.optimizer.sink import Shard
from cumulo.train.parallel.expert_balance import ExpertBalance, move_biases, take_loads
from cumulo.train.parallel.expert_parallel import ExpertParallel
from cumulo.train.parallel.parallel_state import held_state
from cumulo.train.parallel.pipelined import ChunkLoss, forward_schedule, training_schedule


@dataclass(frozen=True, slots=True)
class StepLoss:
    loss: float  # nats per loss token
    balance: float  # mean over rows; 0 without experts


class ModelRun:
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
        overlaps = config.overlap_passes and layout.pp > 1
        self.second_lane = SecondLane(groups) if overlaps else None
        shapes = parameter_shapes(spec)
        if config.lora is not None:
            shapes |= adapter_shapes(spec, config.lora.rank, config.lora.targets)
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
        self.sink = gradient_sink(
            self.chunks,
            self.pieces,
            groups,
            config.master_weights,
            device,
            config.optimizer.offload,
            config.fsdp_prefetch,
            int(config.gradient_bucket_mib * (1 << 20)),
        )
        self._fill(start)
        self.optimizer = ShardedOptimizer(self.sink, config.optimizer, spec, config.master_weights, groups)
        self.balance: ExpertBalance | None = None
        every = config.expert_rebalance_every_steps
        if every and spec.moe is not None and isinstance(split.experts, ExpertParallel):
            models = list(self.chunks.values())
            self.balance = ExpertBalance(models, self.optimizer, spec.moe, groups, split.experts, every)

    @property
    def data_place(self) -> tuple[int, int]:
        """Which of how many parts of each batch is this process's."""
        return self.groups.place.dp, self.layout.dp

    @property
    def shards(self) -> Mapping[str, Shard]:
        """What this rank's optimizer moves and a checkpoint keeps, by the parameter's name."""
        return self.sink.shards if self.balance is None else self.balance.placed(self.sink.shards)

    # -- a step ------------------------------------------------------------------------------------------------
    def agree(self, loss_tokens: int, stop: bool) -> tuple[int, bool]:
        """Loss tokens of all parts of a batch, and whether anyone wants to stop."""
        if self.layout.world == 1:
            return loss_tokens, stop
        place = self.groups.place
        # Those of a data-parallel place have the same rows.
        counts = (place.pp, place.cp, place.tp) == (0, 0, 0)
        said = torch.tensor([loss_tokens * counts, stop], dtype=torch.int64, device=self.device)
        all_reduce(said, self.groups.group("world"))
        tokens, stops = said.tolist()
        return tokens, stops > 0

    def gradients(self, batch: Batch, loss_tokens: int) -> StepLoss:
        """Leave the gradients of the whole batch's mean loss with the optimizer.

        `batch`: the rows of this rank's data-parallel place; `loss_tokens` counts those of all places, so that what
        ranks compute are parts of a sum.
        """
        config, loss_tokens = self.config, max(1, loss_tokens)
        micro_batches, rows = self._cut(batch, config.micro_batch), config.batch_sequences
        players = {
            number: ChunkLoss(
                model, partial(self.sink.leaves, number), loss_tokens, config.balance_loss / rows
            )
            for number, model in self.chunks.items()
        }
        self.sink.begin()
        self._play(training_schedule(self.layout, len(micro_batches)), players, micro_batches)
        self.optimizer.take_gradients(self.sink.finish())
        token_sum, balance_sum = self._total(players)
        return StepLoss(token_sum / loss_tokens, balance_sum / rows)

    def clip(self) -> float:
        """Limit the gradients' norm over everything; returns what it was."""
        return float(self.optimizer.clip())

    def step(self, share: float) -> str | None:
        """Move the weights by the gradients, which are then forgotten, and by their load the experts' biases and
        places, which is news. `share` is the schedule's part of the learning rates."""
        self.optimizer.step(share)
        self.forget()
        rate, moe = self.config.expert_bias_rate, self.spec.moe
        steers = rate > 0 and moe is not None and moe.selection_bias
        if not steers and self.balance is None:
            return None
        models = list(self.chunks.values())
        loads = take_loads(models, self.groups)
        if steers:
            move_biases(models, rate, loads)
        return None if self.balance is None else self.balance.after_step(loads)

    def forget(self) -> None:
        """The gradients, without a step."""
        self.optimizer.zero_grad()

    @torch.no_grad()
    def token_sum(self, batch: Batch, micro: int) -> float:
        """Cross-entropy summed over the loss tokens of all ranks' rows, without gradients."""
        micro_batches = self._cut(batch, micro)
        players = {
            number: ChunkLoss(model, model.parameters, 1, 0.0) for number, model in self.chunks.items()
        }
        self._play(forward_schedule(self.layout, len(micro_batches)), players, micro_batches)
        return self._total(players)[0]

    # -- checkpoints -------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Held]:
        """The live tensors that a checkpoint keeps. What is frozen (under adapters) is kept, too."""
        weights, optimizer = self.optimizer.weights(), self.optimizer.state()
        return held_state(self.shards, weights, optimizer, self.layout, self.groups.rank)

    def loaded(self) -> None:
        """After the state was overwritten."""
        self.optimizer.loaded()

    def whole_parameters(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """The model for an export, adapters beside it, by this process alone. `checkpoint` was just written."""
        if self.layout.world == 1:
            return {name: p for model in self.chunks.values() for name, p in model.named_parameters()}
        return stored_parameters(checkpoint)

    def weights_bytes(self) -> int | None:
        """Bytes of the weights that this process computes with; None: they come and go."""
        if self.layout.zero >= 2:
            return None
        held = {parameter for chunk in self.chunks.values() for parameter in chunk.parameters()}
        return sum(parameter.nbytes for parameter in held)

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
        players: Mapping[int, ChunkLoss],
        micro_batches: list[DeviceBatch],
    ) -> None:
        layout = self.layout
        tokens = micro_batches[0].tokens.numel() // layout.cp
        if layout.sequence_parallel:
            tokens //= layout.tp
        wire = Wire((tokens, self.spec.hidden), self.dtype, self.device)
        transport = Peers(self.groups.group("pp")) if layout.pp > 1 else None
        play(
            schedule,
            self.groups.place.pp,
            players,
            micro_batches,
            wire,
            transport,
            self.sink,
            self.second_lane,
        )

    def _total(self, players: Mapping[int, ChunkLoss]) -> tuple[float, float]:
        """The sums of tokens' losses and of balances over all ranks; tensor-parallel ranks have the same ones."""
        own = sum((player.sums for player in players.values()), torch.zeros(2, dtype=torch.float64))
        if self.layout.world > 1:
            own = (own if self.groups.place.tp == 0 else torch.zeros_like(own)).to(self.device)
            all_reduce(own, self.groups.group("world"))
        token_sum, balance_sum = own.tolist()
        return token_sum, balance_sum


def _share_parameters(chunks: Mapping[int, nn.Module]) -> None:
    """Where two chunks of a rank have the same parameter (a tied embedding), it becomes one tensor."""
    found: dict[str, nn.Parameter] = {}
    for module in chunks.values():
        for name, parameter in list(module.named_parameters()):
            if found.setdefault(name, parameter) is not parameter:
                path, _, last = name.rpartition(".")
                setattr(module.get_submodule(path), last, found[name])


def stored_parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The model's whole parameters from a checkpoint of any layout, in this machine's memory."""
    folder = checkpoint.path / "tensors"
    found = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in stored_shapes(folder).items()
        if name.startswith("model.")
    }
    read_parts(folder, all_parts(held_whole(found)))
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}


def held_out_loss(run: ModelRun, packing: Packing, config: TrainConfig) -> float:
    """Nats per token over the first `evaluate_sequences`; what fills up the last micro-batches does not count."""
    part, parts = run.data_place
    count = min(config.evaluate_sequences, packing.samples_per_epoch)
    # Cuts of a sequence and 8-bit products need the tokens of a whole micro-batch; others do with fewer.
    whole = config.layout.world > parts or config.products != "wide"
    micro = config.micro_batch if whole else min(config.micro_batch, count)
    own = -(-count // (parts * micro)) * micro
    total, loss_tokens = 0.0, 0
    for first in range(part * own, (part + 1) * own, micro):
        batch = _only(packing.batch(first, micro), count - first)
        total += run.token_sum(batch, micro)
        loss_tokens += run.agree(batch.loss_tokens, False)[0]
    return total / max(1, loss_tokens)


def _only(batch: Batch, rows: int) -> Batch:
    """The batch with no loss after its first `rows`."""
    if rows >= len(batch.tokens):
        return batch
    targets = batch.targets.copy()
    targets[max(0, rows) :] = IGNORED
    return replace(batch, targets=targets, loss_tokens=int(np.count_nonzero(targets != IGNORED)))
