"""Trainer: the loop from first to last step, with checkpoints, log and export. `cumulo train` and programs use it.

    result = Trainer(TrainConfig(folder="runs/mine", steps=300)).run()

`run` reads as the story: prepare, build, restore, step until done or stopped, save, export, plot.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from cumulo.base.quantities import LedgerLine
from cumulo.checkpoint.play.huggingface import export_huggingface, export_peft
from cumulo.checkpoint.play.lease import RunLease, take_lease
from cumulo.checkpoint.play.memory import MemoryStore, memory_folder
from cumulo.checkpoint.play.saver import Saver
from cumulo.checkpoint.play.store import Checkpoint, CheckpointStore, Store
from cumulo.collectives.decide.measured import read_collective_profile
from cumulo.errors import ConfigError, TrainingError
from cumulo.ranks.collectives import meter
from cumulo.ranks.groups import Groups
from cumulo.ranks.hang import HangWatch
from cumulo.ranks.team import Team
from cumulo.train.data.packing import BatchLoader, Packing, split_documents
from cumulo.train.data.prepare import Prepared, prepare
from cumulo.train.decide.config import TrainConfig, config_text
from cumulo.train.decide.ledger import write_ledger
from cumulo.train.decide.schedule import SpikeGuard, learning_rate_share
from cumulo.train.model.lora import merged
from cumulo.train.run.forecast import Forecast, training_device
from cumulo.train.run.log import CollectiveLog, RunLog, TrainRecord
from cumulo.train.run.metrics import TrainMetrics, loss_plot, peak_memory_bytes
from cumulo.train.run.model_run import ModelRun, held_out_loss
from cumulo.train.run.state import Progressed, RunState, StopRequest


class RunWatcher(Protocol):
    """Who is told how a run goes: the command line's display, or nobody."""

    def preparing(self, stage: str, done: int, total: int) -> None: ...

    def begins(self, run: "Trainer", first_step: int) -> None: ...

    def step(self, record: TrainRecord, memory_bytes: int) -> None: ...

    def tell(self, message: str) -> None: ...


class Silent:
    def preparing(self, stage: str, done: int, total: int) -> None: ...

    def begins(self, run: "Trainer", first_step: int) -> None: ...

    def step(self, record: TrainRecord, memory_bytes: int) -> None: ...

    def tell(self, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainResult:
    records: tuple[TrainRecord, ...]
    held_out_loss: float | None
    steps: int  # done in all
    finished: bool  # False: stopped before the last step
    seconds: float  # of this run, preparation left out
    data_stall_s: float
    checkpoint_block_s: float
    peak_memory_bytes: int
    model_folder: Path
    adapter_folder: Path | None  # of a run with adapters: they alone, in PEFT's layout
    plot: Path
    ledger: tuple[LedgerLine, ...] = ()  # predicted beside measured; empty: nothing was predicted


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """One process of many: whom it works with. Made by `worker.py`."""

    groups: Groups
    team: Team  # all ranks, on a process group that only checkpoints use


class Trainer:
    def __init__(
        self,
        config: TrainConfig,
        *,
        resume: bool = False,
        watcher: RunWatcher | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`watcher` is told how it goes by rank 0 alone."""
        if ranks is None and config.layout.world > 1:
            raise ConfigError(
                f"layout {config.layout} has {config.layout.world} ranks and this is one process; use "
                "cumulo.ranks.launch, or `cumulo train`"
            )
        self.config, self.resume, self.ranks = config, resume, ranks
        self.team = Team() if ranks is None else ranks.team
        self.lead = self.team.rank == 0
        self.watcher: RunWatcher = watcher if watcher is not None and self.lead else Silent()
        self.device = training_device(config.device)
        self.folder = Path(config.folder)

    def run(self, should_stop: Callable[[int], bool] = lambda step: False) -> TrainResult:
        """Train to the last step. `should_stop(steps_done)` ends earlier, as Ctrl-C does: saved and whole."""
        if not self.resume:
            refuse_to_overwrite(self.folder)
        with self._owned():
            return self._run(should_stop)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[None]:
        """Nobody else trains in this folder meanwhile."""
        self.lease: RunLease | None = None

        def take() -> None:
            self.lease = take_lease(self.folder, self.watcher.tell)

        self.team.first(take)
        try:
            yield
        finally:
            if self.lease is not None:
                self.lease.release()

    def _run(self, should_stop: Callable[[int], bool]) -> TrainResult:
        torch.manual_seed(self.config.seed)
        prepared = self._prepare()
        self._build(prepared)
        if self.resume:
            self._restore_freshest()
        elif self.memory is not None:
            self.memory.forget()
        if self.progress.step >= self.config.steps:
            self.watcher.tell(
                f"all {self.progress.step:,} steps are done already: a larger number of --steps trains further"
            )
        self.log = RunLog(self.folder, self.progress.step, self.team.size) if self.lead else None
        several = self.lead and self.config.layout.world > 1
        profile = read_collective_profile(self.config.collective_profile)
        self.collectives = CollectiveLog(self.folder, self.progress.step, profile) if several else None
        self.metrics: TrainMetrics | None = None
        if self.lead and self.config.metrics_port:
            self.metrics = TrainMetrics(self.folder, self.config.metrics_host, self.config.metrics_port)
            self.watcher.tell(f"metrics: http://{self.config.metrics_host}:{self.metrics.port}/metrics")
        try:
            with StopRequest(self._heard) as stop, self.watch or contextlib.nullcontext():
                result = self._loop(lambda step: stop.asked or should_stop(step))
        finally:
            self.saver.wait()
            if self.log is not None:
                self.log.close()
            if self.collectives is not None:
                self.collectives.close()
            if self.metrics is not None:
                self.metrics.close()
        self.team.first(lambda: self._export(prepared, result))
        if self.memory is not None:
            self.memory.remove()
        return result

    @property
    def progress(self) -> Progressed:
        return self.state.progress

    def _heard(self) -> None:
        """Called by a signal's handler, perhaps in the middle of a line that is being written."""
        with contextlib.suppress(RuntimeError):
            self.watcher.tell(
                "stopping after this step, and saving a checkpoint; press Ctrl-C again to stop at once"
            )

    # -- what a run is made of ------------------------------------------------------------------------------
    def _prepare(self) -> Prepared:
        """Tokenizer and data by the first rank, which the others then find."""
        found: list[Prepared] = []

        def work() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            found.append(prepare(self.config, self.watcher.preparing))
            (self.folder / "config.yaml").write_text(config_text(self.config), "utf-8")

        self.team.first(work)
        return found[0] if found else prepare(self.config, self.watcher.preparing)

    def _build(self, prepared: Prepared) -> None:
        config = self.config
        self.spec, self.dataset = prepared.spec, prepared.dataset
        train, held_out = split_documents(self.dataset, config.seed)
        length = config.data.sequence_length
        self.packing = Packing(
            self.dataset, length, config.seed, train if config.evaluate_sequences else None
        )
        self.held_out: Packing | None = None
        kept = int(self.dataset.starts[held_out + 1].sum() - self.dataset.starts[held_out].sum())
        if config.evaluate_sequences and kept > length:
            self.held_out = Packing(self.dataset, length, config.seed, held_out)
        elif config.evaluate_sequences:
            self.watcher.tell(
                f"no held-out loss: {kept:,} tokens are held out, and one sequence takes {length + 1:,}; more data "
                "or a smaller data.sequence_length gives one"
            )
        self.forecast = Forecast(config, self.spec, self.device, self.team)
        groups = Groups(config.layout) if self.ranks is None else self.ranks.groups
        start = None if prepared.start is None else dict(prepared.start.decoder.named_parameters())
        self.model_run = ModelRun(self.spec, config, groups, self.device, start)
        self.store = CheckpointStore(
            self.folder / "checkpoints", config.checkpoint.keep, self.watcher.tell, self.team,
            may_publish=(lambda: None) if self.lease is None else self.lease.check,
        )  # fmt: skip
        self.memory: MemoryStore | None = None
        if config.checkpoint.memory_every_steps:
            place = memory_folder(Path(config.checkpoint.memory_folder), self.folder)
            self.memory = MemoryStore(place, self.team)
        self.saver = Saver(self.team.rank, self.watcher.tell)
        saves = config.checkpoint.every_steps or config.checkpoint.memory_every_steps
        # 8-bit moments are saved as wider ones, which then should not exist a step longer than they must.
        if saves and config.checkpoint.asynchronous and config.optimizer.kind != "adamw8bit":
            self.saver.prepare(self.model_run.state())
        self.watch: HangWatch | None = None
        if self.ranks is not None:
            self.watch = HangWatch(
                self.folder / "hang", self.team.rank, self.team.size, config.faults.hang_after_s
            )
        self.state = RunState(config, self.packing, self.model_run, SpikeGuard(config.guard))

    def _restore_freshest(self) -> None:
        """From memory if there is nothing later in the folder: it is nearer, and need not be verified."""
        if self.memory is not None and (copy := self.memory.latest()) is not None:
            stored = self.team.first(self.store.steps)
            if copy.step >= max(stored, default=0):
                self.state.restore(copy, self.memory)
                self.watcher.tell(f"resuming after step {copy.step}, from memory ({copy.path})")
                return
        checkpoint = self.store.latest()
        if checkpoint is None:
            self.watcher.tell(f"{self.folder} contains no checkpoint yet: starting at step 1")
            return
        self.state.restore(checkpoint, self.store)
        self.watcher.tell(f"resuming after step {self.progress.step}, from {checkpoint.path}")

    # -- the loop -------------------------------------------------------------------------------------------
    def _loop(self, should_stop: Callable[[int], bool]) -> TrainResult:
        config, begin, run = self.config, time.perf_counter(), self.model_run
        begun_at = self.progress.step
        self.watcher.begins(self, begun_at)
        # Of a run that is finished already it is the last one's.
        held_out = self.log.records[-1].held_out_loss if self.log is not None and self.log.records else None
        stall_s = block_s = 0.0
        loader = self._loader()
        try:
            while self.progress.step < config.steps:
                step_begin, stalled = time.perf_counter(), loader.stall_s
                if self.lease is not None:
                    self.lease.refuse_if_taken()
                if self.watch is not None:
                    self.watch.begin(self.progress.step + 1)
                batch = loader.next()
                tokens, stop = run.agree(batch.loss_tokens, should_stop(self.progress.step))
                if stop:
                    break
                share = learning_rate_share(config.schedule, self.progress.step, config.steps)
                found = self.forecast.gradients(run, batch, tokens)
                norm = run.clip()
                complaint = self.state.guard.complaint(found.loss, norm)
                if complaint is not None and config.guard.action != "ignore":
                    loader.close()
                    self._recover(complaint)
                    loader = self._loader()
                    continue
                saved_s = self.saver.settle()
                news = run.step(share)
                self.state.progress = self.progress.after(config.batch_sequences, tokens)
                step = self.progress.step
                if self.watch is not None:
                    self.watch.between(self._due_after(step), step)
                step_s = time.perf_counter() - step_begin
                if news is not None:
                    self.watcher.tell(f"step {step}: {news}")
                held_out = self._evaluate() if self._evaluates_after(step) else None
                speed = config.batch_sequences * self.packing.length / step_s
                record = TrainRecord(
                    step, self.progress.tokens, found.loss, found.balance, norm, share, held_out, step_s, speed,
                    self.forecast.mfu(speed), loader.stall_s - stalled, saved_s,
                )  # fmt: skip
                if self.log is not None:  # no checkpoint has a step that the log does not have
                    self.log.add([record])
                saved_s += self._save_after(step)
                record = dataclasses.replace(record, checkpoint_block_s=saved_s)
                if self.log is not None:
                    self.log.write(record)
                timed = [] if self.collectives is None else self.collectives.write(step, meter.take_times())
                if self.metrics is not None:
                    self.metrics.update(record, peak_memory_bytes(self.device), timed)
                if begun_at == step - 1:
                    self._ledger()  # who looks at a long run wants the prediction now
                self.watcher.step(record, peak_memory_bytes(self.device))
                stall_s, block_s = stall_s + record.data_stall_s, block_s + saved_s
        finally:
            loader.close()
            if self.watch is not None:
                self.watch.pause()
        finished = self.progress.step >= config.steps
        if not finished:
            block_s += self._save([self.store], later=False)
        if self.saver.failed is not None:
            raise TrainingError(self.saver.failed)
        return TrainResult(
            tuple(self.log.records) if self.log is not None else (), held_out, self.progress.step, finished,
            time.perf_counter() - begin, stall_s, block_s, peak_memory_bytes(self.device), self.folder / "model",
            self.folder / "adapter" if config.lora is not None else None, self.folder / "loss.svg", self._ledger(),
        )  # fmt: skip

    def _loader(self) -> BatchLoader:
        config = self.config
        return BatchLoader(
            self.packing, self.progress.samples, config.batch_sequences, config.data.prefetch_batches,
            self.model_run.data_place,
        )  # fmt: skip

    def _due_after(self, step: int) -> tuple[bool, ...]:
        """What this step's time is followed by; each combination takes as long as it took before."""
        every, last = self.config.checkpoint, step == self.config.steps
        saves = _every(every.memory_every_steps, step), _every(every.every_steps, step)
        return (last, self._evaluates_after(step), *saves)

    def _evaluates_after(self, step: int) -> bool:
        return step == self.config.steps or _every(self.config.evaluate_every_steps, step)

    def _evaluate(self) -> float | None:
        return None if self.held_out is None else held_out_loss(self.model_run, self.held_out, self.config)

    def _save_after(self, step: int) -> float:
        """Where this step's state is due; returns the seconds that training waited."""
        config, last = self.config.checkpoint, step == self.config.steps
        stores: list[Store] = []
        if self.memory is not None and not last and _every(config.memory_every_steps, step):
            stores.append(self.memory)
        if last or _every(config.every_steps, step):
            stores.append(self.store)
        return self._save(stores, later=config.asynchronous and not last) if stores else 0.0

    def _save(self, stores: list[Store], later: bool) -> float:
        return self.saver.save(self.progress.step, self.model_run.state(), self.state.facts(), stores, later)

    def _recover(self, complaint: str) -> None:
        """Stop, or go back to the last checkpoint and on with the data after the batch that did it."""
        step, after = self.progress.step + 1, self.progress.samples + self.config.batch_sequences
        if self.watch is not None:
            self.watch.pause()
        self.model_run.forget()
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
        self.saver.wait()
        checkpoint = self.store.latest()
        if checkpoint is None:
            raise TrainingError(
                f"stopped at step {step}: {complaint}, before there was a checkpoint to go back to"
            )
        if self.memory is not None:
            self.memory.forget()  # it may hold what came after the checkpoint
        self.state.restore(checkpoint, self.store)
        self.state.progress = dataclasses.replace(self.state.progress, samples=after, rollbacks=rollbacks + 1)
        if self.log is not None:
            self.log.forget_after(self.progress.step)
        self.watcher.tell(
            f"step {step}: {complaint}; back to step {self.progress.step}, and the data of that step is skipped"
        )

    def _ledger(self) -> tuple[LedgerLine, ...]:
        """Of rank 0, which keeps it."""
        if self.log is None or not self.log.records:
            return ()
        seconds = sorted(record.step_s for record in self.log.records)[len(self.log.records) // 2]
        if found := self.forecast.ledger(self.model_run, seconds):
            write_ledger(self.folder / "ledger.json", found)
        return found

    # -- the end --------------------------------------------------------------------------------------------
    def _export(self, prepared: Prepared, result: TrainResult) -> None:
        if self.lease is not None:
            self.lease.check()
        saved = Checkpoint(self.store.path_of(result.steps), result.steps, {})
        parameters, lora = self.model_run.whole_parameters(saved), self.config.lora
        export_huggingface(
            result.model_folder, self.spec, merged(parameters, lora), prepared.tokenizer_folder
        )
        if lora is not None and result.adapter_folder is not None:
            base = str(self.config.model.start_from)
            export_peft(
                result.adapter_folder,
                self.spec,
                parameters,
                rank=lora.rank,
                alpha=lora.alpha,
                base_model=base,
            )
        losses = [(record.step, record.loss) for record in result.records]
        held_out = [
            (record.step, record.held_out_loss)
            for record in result.records
            if record.held_out_loss is not None
        ]
        title = f"{self.folder.name}: loss in nats per token"
        result.plot.write_text(loss_plot(title, losses, held_out), "utf-8")


def refuse_to_overwrite(folder: Path) -> None:
    if any((folder / "checkpoints").glob("step-*")):
        raise ConfigError(
            f"{folder} already contains checkpoints; resume them with --resume, or choose another --folder"
        )


def _every(steps: int, step: int) -> bool:
    return bool(steps) and step % steps == 0
