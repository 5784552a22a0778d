"""The engine's own process: takes commands, steps the engine, reports what is new. Started by EngineChild as
`python -m cumulo.serve.engine_link.engine_process DESCRIPTOR`, with an EngineJob on its standard input and the
line to the API process on that descriptor.

Its standard input stays open as long as the API process lives; when it ends, this process ends too, so that
no engine outlives its server.
"""

import contextlib
import gc
import logging
import os
import select
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable
from io import FileIO
from typing import Any

import msgspec
import numpy as np

from cumulo.engine.assembly import Assembly, assemble
from cumulo.engine.decide.core.request import DrawnSample, State
from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.decide.slo import learning_prompts
from cumulo.engine.engine import Engine
from cumulo.engine.guides.guided import is_fault_of_guide
from cumulo.engine.guides.trial import GuideCompilerBusy
from cumulo.engine.outputs import RequestOutput
from cumulo.engine.play.ranked_runner import RankedRunner
from cumulo.errors import CumuloError, InvalidRequest, Overloaded
from cumulo.serve.engine_link.adapter_loader import AdapterLoader, load_now
from cumulo.serve.engine_link.guide_checker import GuideChecker
from cumulo.serve.engine_link.message_line import MessageLine
from cumulo.serve.engine_link.messages import (
    Abort,
    AdapterReport,
    BlockMap,
    Command,
    DropAdapter,
    EngineJob,
    EngineProgress,
    Failure,
    FairnessReport,
    Fatal,
    Finished,
    InspectBlocks,
    LoadAdapter,
    Ready,
    Report,
    Shutdown,
    Stats,
    Submit,
    TierStats,
    TransferStats,
    decode_command,
    encode,
)
from cumulo.serve.engine_link.step_meter import RoutingReporter, StepMeter
from cumulo.serve.stderr_log import start_logging

HEARTBEAT_S = 1.0  # between reports while idle
FAIRNESS_S = 0.5  # between reports of who was served how much
SAVE_S = 2.0  # for KV blocks that go to disk when the engine ends
QUIET_S = 0.1  # longest silence while steps finish without news for anyone (a long prompt)

log = logging.getLogger(__name__)


class EngineLoop:
    """Commands in, steps, reports out, until told to stop."""

    def __init__(
        self,
        engine: Engine,
        line: MessageLine,
        for_router: bool = False,
        ledger: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`ledger`: the memory plan with what is held now."""
        self._ledger = ledger
        self.engine, self._line = engine, line
        self._news = RoutingReporter(engine.scheduler) if for_router else None
        self._ranked = engine.runner if isinstance(engine.runner, RankedRunner) else None
        self.meter = StepMeter()
        engine.on_step = self.meter.note
        self._received = 0
        self._reported_s = 0.0
        self._fairness_reported_s = 0.0
        self._poller = select.poll()
        self._poller.register(line, select.POLLIN)
        if engine.link is not None:
            self._poller.register(engine.link.news.fileno(), select.POLLIN)
        self._adapters = AdapterLoader(engine.adapters)
        self._poller.register(self._adapters.done.fileno(), select.POLLIN)
        if engine.mover is not None:
            self._poller.register(engine.mover.news.fileno(), select.POLLIN)
        self._guides: GuideChecker | None = None
        if engine.guidance is not None:
            self._guides = GuideChecker(engine.guidance)
            self._poller.register(self._guides.done.fileno(), select.POLLIN)

    def run(self) -> None:
        engine = self.engine
        while self._take_commands(self._patience_s()):
            engine.exchange()
            if engine.has_work:
                output = engine.step()
                if output.deltas or output.finished or time.perf_counter() - self._reported_s > QUIET_S:
                    finished = [finished_report(done) for done in output.finished if done.error is None]
                    failed = [
                        (done.request_id, _failure(done.error)) for done in output.finished if done.error
                    ]
                    self._send(EngineProgress(self._stats(), output.deltas, finished, failed))
            elif time.perf_counter() - self._reported_s > HEARTBEAT_S / 2:
                self._send(EngineProgress(self._stats()))
        self._adapters.close()
        if self._guides is not None:
            self._guides.close()

    def _patience_s(self) -> float:
        """How long to wait for commands or another engine's word before the next step."""
        if not self.engine.has_work:
            return HEARTBEAT_S
        return QUIET_S if self.engine.idle else 0.0

    def _take_commands(self, wait_s: float) -> bool:
        """Carry out every command that is here, waiting for the first; False when told to stop."""
        ready = [descriptor for descriptor, _ in self._poller.poll(int(wait_s * 1000))]
        if not ready:
            return True
        if self._guides is not None and self._guides.done.fileno() in ready:
            self._take_checked(self._guides)
        for report in self._adapters.take_read():
            self._send(msgspec.structs.replace(report, ledger=self._ledger()))
        if self._line.fileno() not in ready:
            return True
        if self._line.has_unsent:
            self._flush()
        for packed in self._line.receive():
            command = decode_command(packed)
            if isinstance(command, Shutdown):
                return False
            self._carry_out(command)
        return not self._line.closed

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._received += 1
            if self._news is not None:
                self._news.expect(command)
            if command.params.guide is not None and self._guides is not None:
                self._guides.begin(command)
            else:
                self._add(command)
        elif isinstance(command, Abort):
            if self._guides is not None and command.request_id in self._guides.pending:
                self._guides.pending[command.request_id] = True
            else:
                self.engine.abort(command.request_id)
        elif isinstance(command, InspectBlocks):
            self._send(self._block_map())
        elif isinstance(command, LoadAdapter):
            self._adapters.begin(command)
        elif isinstance(command, DropAdapter) and self.engine.adapters is not None:
            with contextlib.suppress(InvalidRequest):  # this engine could not load it
                self.engine.adapters.drop(command.key)

    def _take_checked(self, guides: GuideChecker) -> None:
        """Requests whose guides are compiled go into the engine; those refused go back."""
        for checked in guides.take_checked():
            submit = checked.submit
            if checked.refusal is not None:
                failure = Failure(checked.refusal, not checked.busy, of_guide=True, busy=checked.busy)
                self._refuse(submit, failure)
            elif self._add(submit) and checked.aborted:
                self.engine.abort(submit.request_id)

    def _add(self, submit: Submit) -> bool:
        drawn = submit.resumed_samples or ([(submit.resumed, None)] if submit.resumed else [])
        try:
            self.engine.add(
                array("i", submit.tokens),
                submit.params,
                request_id=submit.request_id,
                priority=submit.priority,
                cache_salt=submit.cache_salt,
                tenant=submit.tenant,
                stream=submit.stream,
                samples=[DrawnSample(array("i", tokens), reason) for tokens, reason in drawn],
                slo=submit.slo,
                adapter=submit.adapter,
            )
        except Overloaded as error:
            return self._refuse(submit, Failure(str(error), retry_after_s=error.retry_after_s))
        except InvalidRequest as error:
            return self._refuse(submit, Failure(str(error), refused=True))
        except GuideCompilerBusy as error:
            return self._refuse(submit, Failure(str(error), of_guide=True, busy=True))
        return True

    def _refuse(self, submit: Submit, failure: Failure) -> bool:
        self._send(EngineProgress(self._stats(), failed=[(submit.request_id, failure)]))
        return False

    def _stats(self) -> Stats:
        scheduler, records = self.engine.scheduler, self.meter.records
        self.meter.records = []
        return Stats(
            steps=self.meter.steps,
            received=self._received,
            # The list may hold ended sequences until the next plan.
            running=sum(sequence.state == State.RUNNING for sequence in scheduler.running),
            waiting=scheduler.queue.count + (len(self._guides.pending) if self._guides else 0),
            blocks_used=scheduler.pool.used_count,
            blocks_total=scheduler.pool.blocks,
            blocks_cached=scheduler.pool.cached_count,
            evictions=scheduler.pool.evictions,
            guides_checked=self._guides.checked if self._guides else 0,
            records=records,
            fairness=self._fairness(),
            routing=self._news.take_news() if self._news is not None else None,
            transfers=self._transfers() if self.engine.link is not None else None,
            ranks=self._ranked.rank_states() if self._ranked is not None else [],
            tiers=self._tiers(),
        )

    def _tiers(self) -> TierStats | None:
        tiers = self.engine.scheduler.tiers
        if tiers is None:
            return None
        mover = self.engine.mover
        disk_bytes = mover.files.used_bytes if mover is not None else 0
        held = tiers.host.count, len(tiers.host.block_of), len(tiers.on_disk), disk_bytes
        return TierStats(*held, tiers.counts)

    def _transfers(self) -> TransferStats:
        one = self.engine.scheduler.transfers
        return TransferStats(
            one.heard, one.landed, one.failed, one.copied_bytes, one.copying_s, len(one.of_request),
            len(self.engine.scheduler.prefilling.outgoing), sorted(one.peers),
        )  # fmt: skip

    def _fairness(self) -> FairnessReport | None:
        now_s, shares = time.perf_counter(), self.engine.scheduler.shares
        if now_s - self._fairness_reported_s < FAIRNESS_S:
            return None
        self._fairness_reported_s = now_s
        return FairnessReport(shares.index(now_s), shares.take_served())

    def _block_map(self) -> BlockMap:
        pool = self.engine.scheduler.pool
        owners: list[str] = []
        owner_of = [-1] * pool.blocks
        for sequence in self.engine.scheduler.running:
            if sequence.blocks:
                owners.append(sequence.request.id)
                for block in sequence.blocks:
                    owner_of[block] = len(owners) - 1
        cached = bytes(block_hash is not None for block_hash in pool.hash_of)
        return BlockMap(owners, owner_of, cached)

    def _send(self, report: Report) -> None:
        say(self._line, report)
        self._watch_line()
        self._reported_s = time.perf_counter()

    def _flush(self) -> None:
        """The API process bounds what is in flight; nothing is dropped, and no step waits for whoever reads it."""
        with contextlib.suppress(OSError):
            self._line.flush()
        self._watch_line()

    def _watch_line(self) -> None:
        """For room only while something waits for it: a line that has room is always ready."""
        self._poller.modify(self._line, select.POLLIN | (select.POLLOUT if self._line.has_unsent else 0))


def say(line: MessageLine, report: Report) -> None:
    """If nobody listens any more, the loop ends by itself."""
    try:
        line.send(encode(report))
    except OSError:
        log.debug("nobody listens to this engine any more")


def finished_report(done: RequestOutput) -> Finished:
    embedding = None if done.embedding is None else np.array(done.embedding, dtype="<f4").tobytes()
    return Finished(done.request_id, done.samples, done.story, done.prompt_logprobs, embedding)


def _failure(error: str) -> Failure:
    of_guide = is_fault_of_guide(error)
    return Failure(error, refused=of_guide, of_guide=of_guide)


def ready_report(assembly: Assembly, adapters: list[AdapterReport]) -> Ready:
    return Ready(
        adapters=adapters,
        model_name=assembly.model.name,
        max_context=assembly.memory.max_context,
        vocab_size=assembly.model.spec.vocab_size,
        hidden_size=assembly.model.spec.hidden,
        eos_ids=list(assembly.model.eos_ids),
        generation_defaults=dict(assembly.model.generation_defaults),
        kv_blocks=assembly.memory.kv_blocks,
        block_size=assembly.config.block_size,
        max_running=assembly.config.max_running,
        max_tokens_per_step=assembly.config.max_tokens_per_step,
        runs_on=assembly.runs_on,
        ledger=assembly.ledger().to_dict(),
    )


def warm_up(engine: Engine) -> None:
    """Two steps before anyone waits for one: whatever is made on first use is made now. The workers for guides
    start beside it (GuideChecker)."""
    engine.add([0], SamplingParams(max_tokens=2, ignore_eos=True, temperature=0))
    while engine.has_work:
        engine.step()
    engine.scheduler.shares.take_served()  # nobody's: it is not told
    if engine.scheduler.config.slo is not None:
        _learn_pace(engine)
    if engine.guidance is not None:
        with contextlib.suppress(
            InvalidRequest
        ):  # this model cannot be guided; requests that ask are told so
            engine.guidance.matcher(Guide("json_object"))  # our own, so it needs no trial


def _learn_pace(engine: Engine) -> None:
    """An engine that promises a latency knows how long its steps take before anyone is promised anything."""
    scheduler = engine.scheduler
    scheduler.slo.forget()  # steps that made something say nothing about later ones
    for length in learning_prompts(scheduler.costs, scheduler.config.slo, scheduler.config.max_context):
        params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
        engine.add([0] * length, params, cache_salt=f"learning {length}")
        while engine.has_work:
            engine.step()
    scheduler.pool.clear_cache()
    scheduler.shares.take_served()


def _end_with_parent(stdin: FileIO) -> None:
    """Blocks until the API process is gone, however it went; then there is nobody to compute for."""
    while stdin.read(4096):
        pass
    os._exit(1)


def main() -> None:
    # Unbuffered: a thread waiting in a buffer's lock would spoil a clean exit.
    stdin = FileIO(0, closefd=False)
    told = stdin.readline()
    if not told:
        return  # it was started early, and the server could not start
    job = msgspec.json.decode(told, type=EngineJob)
    threading.Thread(target=_end_with_parent, args=(stdin,), daemon=True).start()
    start_logging(job.log_level, "engine")
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    line = MessageLine(connection)
    try:
        assembly = assemble(job.model, job.config, job.keep_quantised, None)
        assembly.player.runner.warm_up(log.info)
        warm_up(assembly.engine)
        adapters = [load_now(assembly.engine.adapters, order) for order in job.adapters]
        if job.needs_adapters and (refused := [report.error for report in adapters if report.error]):
            raise CumuloError(refused[0])
        # What is loaded stays: the collector need not walk it again at every full collection.
        gc.collect()
        gc.freeze()
        say(line, ready_report(assembly, adapters))
        loop = EngineLoop(assembly.engine, line, job.for_router, lambda: assembly.ledger().to_dict())
        loop.run()
        assembly.engine.save_tiers(SAVE_S)
        assembly.player.runner.close()
        if assembly.engine.link is not None:
            assembly.engine.link.close()
    except CumuloError as error:
        say(line, Fatal(str(error)))
        sys.exit(2)
    except Exception as error:
        log.exception("the engine process ends")
        say(line, Fatal(f"{type(error).__name__}: {error}"))
        sys.exit(1)
    finally:
        line.close(patience_s=2.0)


if __name__ == "__main__":
    main()
