"""Trainer: the loop from first to last step, with checkpoints, log and export. `cumulo train` and programs use it.

    result = Trainer(TrainConfig(folder="runs/mine", steps=300)).run()

`run` reads as the story: prepare, build, restore, step until done or stopped, save, export, plot.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from cumulo.checkpoint.huggingface import export_huggingface
from cumulo.checkpoint.store import CheckpointStore
from cumulo.errors import ConfigError, TrainingError
from cumulo.train.config import TrainConfig, config_text
from cumulo.train.guard import SpikeGuard
from cumulo.train.initialise import initialise
from cumulo.train.interrupt import StopRequest
from cumulo.train.loader import BatchLoader
from cumulo.train.log import RunLog, StepRecord
from cumulo.train.lora import adapt, merged_parameters
from cumulo.train.meter import peak_flops, peak_memory_bytes, training_flops_per_token
from cumulo.train.model import TrainingDecoder
from cumulo.train.optimizer import Optimizer
from cumulo.train.packing import Packing, split_documents
from cumulo.train.plot import loss_plot
from cumulo.train.prepare import Prepared, prepare
from cumulo.train.schedule import learning_rate_share
from cumulo.train.state import Progressed, restore, saved_facts, saved_tensors
from cumulo.train.step import compute_gradients, held_out_loss


class Watcher(Protocol):
    """Who is told how a run goes: the command line's display, or nobody."""

    def preparing(self, stage: str, done: int, total: int) -> None: ...

    def begins(self, run: "Trainer", first_step: int) -> None: ...

    def step(self, record: StepRecord, memory_bytes: int) -> None: ...

    def tell(self, message: str) -> None: ...


class Silent:
    def preparing(self, stage: str, done: int, total: int) -> None: ...

    def begins(self, run: "Trainer", first_step: int) -> None: ...

    def step(self, record: StepRecord, memory_bytes: int) -> None: ...

    def tell(self, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainResult:
    records: tuple[StepRecord, ...]
    held_out_loss: float | None
    steps: int  # done in all
    finished: bool  # False: stopped before the last step
    seconds: float  # of this run, preparation left out
    data_stall_s: float
    checkpoint_block_s: float
    peak_memory_bytes: int
    model_folder: Path
    plot: Path


class Trainer:
    def __init__(self, config: TrainConfig, *, resume: bool = False, watcher: Watcher | None = None) -> None:
        self.config, self.resume = config, resume
        self.watcher: Watcher = watcher or Silent()
        self.device = _device(config.device)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.folder = Path(config.folder)

    def run(self, should_stop: Callable[[int], bool] = lambda step: False) -> TrainResult:
        """Train to the last step. `should_stop(steps_done)` ends earlier, as Ctrl-C does: saved and whole."""
        self._refuse_to_overwrite()
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(self.config.seed)
        prepared = prepare(self.config, self.watcher.preparing)
        (self.folder / "config.yaml").write_text(config_text(self.config), "utf-8")
        self._build(prepared)
        self._restore_latest() if self.resume else None
        self.log = RunLog(self.folder, self.progress.step)
        try:
            with StopRequest() as stop:
                result = self._loop(lambda step: stop.asked or should_stop(step))
        finally:
            self.store.wait()
            self.log.close()
        export_huggingface(
            self.folder / "model", self.spec, merged_parameters(self.model), prepared.tokenizer_folder
        )
        self._plot(result.plot)
        return result

    # -- what a run is made of ------------------------------------------------------------------------------
    def _build(self, prepared: Prepared) -> None:
        config = self.config
        self.spec, self.dataset = prepared.spec, prepared.dataset
        train, held_out = split_documents(self.dataset, config.seed)
        length = config.data.sequence_length
        self.packing = Packing(
            self.dataset, length, config.seed, train if config.evaluate_sequences else None
        )
        self.held_out: Packing | None = None
        if (
            config.evaluate_sequences
            and self.dataset.starts[held_out + 1].sum() - self.dataset.starts[held_out].sum() > length
        ):
            self.held_out = Packing(self.dataset, length, config.seed, held_out)
        self.model = TrainingDecoder(self.spec, self.dtype, self.device, recompute=config.recompute)
        if prepared.start is None:
            initialise(dict(self.model.named_parameters()), self.spec, config.seed)
        else:
            self.model.load_state_dict(prepared.start.decoder.state_dict())
        if config.lora is not None:
            adapt(self.model, config.lora, config.seed)
        parameters = dict(self.model.named_parameters())
        self.optimizer = Optimizer(parameters, config.optimizer, self.spec, config.master_weights)
        self.store = CheckpointStore(self.folder / "checkpoints", config.checkpoint.keep, self.watcher.tell)
        self.guard = SpikeGuard(config.guard)
        self.progress = Progressed()
        self.flops_per_token = training_flops_per_token(self.spec, length)
        self.peak, self.peak_source = peak_flops(self.device, self.dtype)

    def _refuse_to_overwrite(self) -> None:
        if not self.resume and any((self.folder / "checkpoints").glob("step-*")):
            raise ConfigError(
                f"{self.folder} already has checkpoints; go on with --resume, or set another folder"
            )

    def _restore_latest(self) -> None:
        checkpoint = self.store.latest()
        if checkpoint is None:
            self.watcher.tell(f"{self.folder} has no checkpoint yet: beginning at step 1")
            return
        self.progress = restore(self, checkpoint)
        self.watcher.tell(f"going on after step {self.progress.step}, from {checkpoint.path}")

    # -- the loop -------------------------------------------------------------------------------------------
    def _loop(self, should_stop: Callable[[int], bool]) -> TrainResult:
        config, begin = self.config, time.perf_counter()
        self.watcher.begins(self, self.progress.step)
        held_out: float | None = None
        stall_s = block_s = 0.0
        loader = self._loader()
        try:
            while self.progress.step < config.steps and not should_stop(self.progress.step):
                step_begin, stalled = time.perf_counter(), loader.stall_s
                batch = loader.next()
                share = learning_rate_share(config.schedule, self.progress.step, config.steps)
                found = compute_gradients(
                    self.model, self.optimizer, batch, config.micro_batch, config.balance_loss, self.device
                )
                norm = float(self.optimizer.clip())
                complaint = self.guard.complaint(found.loss, norm)
                if complaint is not None and config.guard.action != "ignore":
                    loader.close()
                    self._recover(complaint)
                    loader = self._loader()
                    continue
                self.optimizer.step(share)
                self.optimizer.zero_grad()
                self.progress = self.progress.after(len(batch.tokens), batch.learnt_tokens)
                step = self.progress.step
                step_s = time.perf_counter() - step_begin
                held_out = self._evaluate() if self._evaluates_after(step) else None
                saved_s = 0.0
                if step == config.steps or (
                    config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0
                ):
                    saved_s = self._save(later=config.checkpoint.asynchronous and step < config.steps)
                speed = batch.tokens.size / step_s
                record = StepRecord(
                    step, self.progress.tokens, found.loss, found.balance, norm, share, held_out, step_s, speed,
                    speed * self.flops_per_token / self.peak, loader.stall_s - stalled, saved_s,
                )  # fmt: skip
                self.log.write(record)
                self.watcher.step(record, peak_memory_bytes(self.device))
                stall_s, block_s = stall_s + record.data_stall_s, block_s + saved_s
        finally:
            loader.close()
        finished = self.progress.step == config.steps
        if not finished:
            block_s += self._save(later=False)
        if self.store.failed is not None:
            raise TrainingError(self.store.failed)
        return TrainResult(
            tuple(self.log.records), held_out, self.progress.step, finished, time.perf_counter() - begin, stall_s,
            block_s, peak_memory_bytes(self.device), self.folder / "model", self.folder / "loss.svg",
        )  # fmt: skip

    def _loader(self) -> BatchLoader:
        config = self.config
        return BatchLoader(
            self.packing, self.progress.samples, config.batch_sequences, config.data.prefetch_batches
        )

    def _evaluates_after(self, step: int) -> bool:
        every = self.config.evaluate_every_steps
        return self.held_out is not None and (step == self.config.steps or bool(every and step % every == 0))

    def _evaluate(self) -> float:
        assert self.held_out is not None
        config = self.config
        return held_out_loss(
            self.model, self.held_out, config.evaluate_sequences, config.micro_batch, self.device
        )

    def _save(self, later: bool) -> float:
        return self.store.save(self.progress.step, saved_tensors(self), saved_facts(self), later)

    def _recover(self, complaint: str) -> None:
        """Stop, or go back to the last checkpoint and on with the data after the batch that did it."""
        step, after = self.progress.step + 1, self.progress.samples + self.config.batch_sequences
        self.optimizer.zero_grad()
        guard, rollbacks = self.config.guard, self.progress.rollbacks
        if guard.action == "stop":
            raise TrainingError(
                f"stopped at step {step}: {complaint}; lower the learning rate, look at the data near sample "
                f"{self.progress.samples}, or set guard.action to rollback"
            )
        if rollbacks >= guard.most_rollbacks:
            raise TrainingError(
                f"stopped at step {step}: {complaint}, after going back {rollbacks} times already; "
                "lower the learning rate"
            )
        checkpoint = self.store.latest()
        if checkpoint is None:
            raise TrainingError(
                f"stopped at step {step}: {complaint}, before there was a checkpoint to go back to"
            )
        self.progress = dataclasses.replace(restore(self, checkpoint), samples=after, rollbacks=rollbacks + 1)
        self.log.forget_after(self.progress.step)
        self.watcher.tell(f"step {step}: {complaint}; back to step {self.progress.step}, past that data")

    def _plot(self, path: Path) -> None:
        records = self.log.records
        losses = [(record.step, record.loss) for record in records]
        held_out = [
            (record.step, record.held_out_loss) for record in records if record.held_out_loss is not None
        ]
        path.write_text(loss_plot(f"{self.folder.name}: loss in nats per token", losses, held_out), "utf-8")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is unknown; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, and torch finds no GPU here; use cpu or auto")
    return device
