"""ModelRun: the model and its optimizer as the trainer's loop sees them, in one process or in one of many.

`AloneRun` has the whole model; `RankedRun` has this rank's part of it, and answers the same on all ranks.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from cumulo.checkpoint.play.boxes import read_parts, stored_shapes
from cumulo.checkpoint.play.held import Held, all_parts, held_whole
from cumulo.checkpoint.play.store import Checkpoint
from cumulo.models.files.load import LoadedModel
from cumulo.ranks.collectives import all_reduce
from cumulo.ranks.groups import Groups
from cumulo.spec.model import ModelSpec
from cumulo.train.data.loader import to_device
from cumulo.train.data.packing import Batch
from cumulo.train.decide.config import TrainConfig
from cumulo.train.model.arithmetic import ARITHMETICS
from cumulo.train.model.initialise import initialise
from cumulo.train.model.lora import adapt
from cumulo.train.model.model import TrainingDecoder
from cumulo.train.model.offload import offload_activations
from cumulo.train.optimizer.optimizer import Optimizer
from cumulo.train.parallel.expert_bias import steer_selection_biases
from cumulo.train.parallel.parallel import ParallelRun
from cumulo.train.parallel.parallel_state import held_state
from cumulo.train.run.step import StepLoss, compute_gradients


class ModelRun(Protocol):
    data_place: tuple[int, int]  # which of how many parts of each batch is this process's

    def agree(self, learnt_tokens: int, stop: bool) -> tuple[int, bool]:
        """Learnt tokens of all parts of a batch, and whether anyone wants to stop."""
        ...

    def gradients(self, batch: Batch, learnt_total: int) -> StepLoss:
        """Leave the gradients of the whole batch's mean loss with the optimizer; `batch` is this process's part."""
        ...

    def clip(self) -> float:
        """Limit the gradients' norm over everything; returns what it was."""
        ...

    def step(self, share: float) -> str | None:
        """Move the weights and forget the gradients; what the user should hear of it, if anything."""
        ...

    def forget(self) -> None:
        """The gradients, without a step."""
        ...

    def token_sum(self, batch: Batch, micro_batch: int) -> float:
        """Cross-entropy over the learnt tokens of all parts, without gradients."""
        ...

    def state(self) -> dict[str, Held]:
        """The live tensors that a checkpoint keeps."""
        ...

    def loaded(self) -> None:
        """After the state was overwritten."""
        ...

    def whole_parameters(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        """The model for an export, adapters beside it, by this process alone. `checkpoint` was just written."""
        ...

    def weights_bytes(self) -> int | None:
        """Of the weights that this process computes with; None: they come and go."""
        ...


class AloneRun:
    data_place = (0, 1)

    def __init__(
        self, spec: ModelSpec, config: TrainConfig, device: torch.device, start: LoadedModel | None
    ) -> None:
        self.config, self.device = config, device
        self.model = TrainingDecoder(
            spec,
            getattr(torch, config.dtype),
            device,
            recompute=config.recompute or config.recompute_operations,
            arithmetic=ARITHMETICS[config.products],
            fused=False if config.compile else None,
        )
        if start is None:
            initialise(dict(self.model.named_parameters()), spec, config.seed)
        else:
            self.model.load_state_dict(start.decoder.state_dict())
        if config.lora is not None:
            adapt(self.model, config.lora, config.seed)
        if config.offload_activations:
            offload_activations(self.model)
        if config.compile:
            self.model.compile_layers()
        self.optimizer = Optimizer(
            dict(self.model.named_parameters()), config.optimizer, spec, config.master_weights
        )

    def agree(self, learnt_tokens: int, stop: bool) -> tuple[int, bool]:
        return learnt_tokens, stop

    def gradients(self, batch: Batch, learnt_total: int) -> StepLoss:
        config = self.config
        return compute_gradients(
            self.model, self.optimizer, batch, config.micro_batch, config.balance_loss, self.device
        )

    def clip(self) -> float:
        return float(self.optimizer.clip())

    def step(self, share: float) -> str | None:
        self.optimizer.step(share)
        if self.config.expert_bias_rate:
            steer_selection_biases([self.model], self.config.expert_bias_rate, None)
        self.forget()
        return None

    def forget(self) -> None:
        self.optimizer.zero_grad()

    @torch.no_grad()
    def token_sum(self, batch: Batch, micro_batch: int) -> float:
        return sum(
            float(self.model(to_device(batch.rows(first, first + micro_batch), self.device)).token_sum)
            for first in range(0, len(batch.tokens), micro_batch)
        )

    def state(self) -> dict[str, Held]:
        """What is frozen (under adapters) is in the model they were made from, but kept too."""
        tensors: dict[str, Tensor] = {
            f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()
        }
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        return held_whole(tensors)

    def loaded(self) -> None:
        self.optimizer.loaded()

    def whole_parameters(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        return dict(self.model.named_parameters())

    def weights_bytes(self) -> int | None:
        return sum(parameter.nbytes for parameter in self.model.parameters())


class RankedRun:
    def __init__(
        self,
        spec: ModelSpec,
        config: TrainConfig,
        device: torch.device,
        start: LoadedModel | None,
        groups: Groups,
    ) -> None:
        weights = None if start is None else dict(start.decoder.named_parameters())
        self.config, self.device, self.groups = config, device, groups
        self.run = ParallelRun(spec, config, groups, device, weights)
        self.data_place = (groups.place.dp, config.layout.dp)

    def agree(self, learnt_tokens: int, stop: bool) -> tuple[int, bool]:
        place = self.groups.place
        counts = (place.pp, place.cp, place.tp) == (
            0,
            0,
            0,
        )  # those of a data-parallel place have the same rows
        said = torch.tensor([learnt_tokens * counts, stop], dtype=torch.int64, device=self.device)
        all_reduce(said, self.groups.group_of_several("world"))
        learnt, stops = said.tolist()
        return learnt, stops > 0

    def gradients(self, batch: Batch, learnt_total: int) -> StepLoss:
        return self.run.gradients(batch, learnt_total, self.config.batch_sequences)

    def clip(self) -> float:
        return float(self.run.optimizer.clip())

    def step(self, share: float) -> str | None:
        news = self.run.move(share)
        self.forget()
        return news

    def forget(self) -> None:
        self.run.optimizer.zero_grad()

    def token_sum(self, batch: Batch, micro_batch: int) -> float:
        return self.run.token_sum(batch, micro_batch)

    def state(self) -> dict[str, Held]:
        optimizer, groups = self.run.optimizer, self.groups
        return held_state(self.run.shards, optimizer.weights(), optimizer.state(), groups.layout, groups.rank)

    def loaded(self) -> None:
        self.run.optimizer.loaded()

    def whole_parameters(self, checkpoint: Checkpoint) -> Mapping[str, Tensor]:
        return stored_parameters(checkpoint)

    def weights_bytes(self) -> int | None:
        if self.groups.layout.zero >= 2:
            return None
        held = {parameter for chunk in self.run.chunks.values() for parameter in chunk.parameters()}
        return sum(parameter.nbytes for parameter in held)


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
