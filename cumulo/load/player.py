"""Plays a schedule against a server and records what happened. It decides nothing: times come from the plan."""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cumulo.load import prompts
from cumulo.load.answer import MeasuredAnswer
from cumulo.load.client import PATHS, RequestFailed, Target, http_request, send
from cumulo.load.connection import Pool
from cumulo.load.prompts import Ruler
from cumulo.load.schedule import PlannedConversation, PlannedTurn, Schedule
from cumulo.load.summary import RequestRecord

TRACE_BLOCK_TOKENS = 512  # the block of the Mooncake traces
_LONGEST_BACK_OFF_S = 30.0

Messages = list[dict[str, str]]


@dataclass(slots=True)
class Level:
    """A schedule being played, for whoever watches: all records so far and the answers still arriving."""

    schedule: Schedule
    records: list[RequestRecord] = field(default_factory=list)  # those that have ended
    running: dict[int, tuple[RequestRecord, MeasuredAnswer]] = field(default_factory=dict)
    began_s: float = 0.0  # on the loop's clock
    wall_s: float = 0.0
    cpu_s: float = 0.0  # the generator's own
    most_running: int = 0
    stopped: bool = False  # before its end, by the watcher or the user


@dataclass(slots=True)
class LoadPlayer:
    """Owns the connections to one server."""

    pool: Pool
    target: Target
    ruler: Ruler = Ruler()
    timeout_s: float = 600.0
    retries: int = 0
    _sent: int = 0

    async def play(
        self, level: Level, watch: Callable[[Level], object] | None = None, watch_every_s: float = 0.5
    ) -> None:
        """Send everything and wait for all answers. `watch` sees the level now and then; False ends it."""
        loop = asyncio.get_running_loop()
        schedule = level.schedule
        level.began_s = loop.time()
        self._sent = 0
        with _light_garbage_collection():
            began_cpu_s = time.process_time()
            playing = asyncio.create_task(
                self._closed_loop(level, schedule.concurrency)
                if schedule.concurrency
                else self._open_loop(level)
            )
            try:
                while not playing.done():
                    await asyncio.wait([playing], timeout=watch_every_s)
                    if watch is not None and watch(level) is False:
                        level.stopped = not playing.done()
                        break
            except asyncio.CancelledError:
                level.stopped = True
                raise
            finally:
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
                level.wall_s = loop.time() - level.began_s
                level.cpu_s = time.process_time() - began_cpu_s
        if not playing.cancelled() and (error := playing.exception()) is not None:
            raise error

    async def _open_loop(self, level: Level) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            for conversation in level.schedule.conversations:
                start_s = conversation.start_s or 0.0
                if level.schedule.stop_s is not None and start_s > level.schedule.stop_s:
                    break
                wait_s = level.began_s + start_s - loop.time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._converse(level, conversation, start_s))

    async def _closed_loop(self, level: Level, places: int) -> None:
        loop = asyncio.get_running_loop()
        waiting = iter(level.schedule.conversations)
        stop_s = level.schedule.stop_s

        async def place() -> None:
            for conversation in waiting:
                now_s = loop.time() - level.began_s
                if stop_s is not None and now_s >= stop_s:
                    return
                await self._converse(level, conversation, now_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(places):
                group.create_task(place())

    async def _converse(self, level: Level, conversation: PlannedConversation, start_s: float) -> None:
        loop = asyncio.get_running_loop()
        messages: Messages = []
        if conversation.prefix_tokens:
            words = self.ruler.words_for(conversation.prefix_tokens, with_overhead=False)
            messages.append({"role": "system", "content": prompts.text(str(conversation.prefix), words)})
        due_s = start_s
        for position, turn in enumerate(conversation.turns):
            if position:
                due_s = loop.time() - level.began_s + turn.think_s
                due_s = max(due_s, turn.not_before_s or 0.0)
                await asyncio.sleep(level.began_s + due_s - loop.time())
            messages.append({"role": "user", "content": self._text(conversation, position, turn)})
            self._sent += 1
            record = RequestRecord(
                self._sent - 1, conversation.number, position, conversation.measured, due_s,
                input_tokens_planned=turn.input_tokens + (0 if position else conversation.prefix_tokens),
                output_tokens_planned=turn.output_tokens,
            )  # fmt: skip
            is_last = position == len(conversation.turns) - 1
            answer = await self._ask(level, record, messages, turn, keep_text=not is_last)
            if answer is None:
                return  # the rest would talk about an answer that never came
            messages.append({"role": "assistant", "content": answer.text})

    async def _ask(
        self, level: Level, record: RequestRecord, messages: Messages, turn: PlannedTurn, keep_text: bool
    ) -> MeasuredAnswer | None:
        loop = asyncio.get_running_loop()
        body = self.target.body(messages, turn.output_tokens)
        request = http_request(self.pool, "POST", PATHS[self.target.endpoint], self.target.api_key, body)
        record.sent_s = loop.time() - level.began_s
        answer = MeasuredAnswer(keep_text)
        level.running[record.number] = record, answer
        level.most_running = max(level.most_running, len(level.running))
        failure: RequestFailed | None = None
        back_off_s = 0.0
        try:
            while True:
                try:
                    await send(self.pool, request, answer, self.timeout_s)
                    failure = None
                except RequestFailed as error:
                    failure = error
                    if error.status in (429, 503):
                        back_off_s = min(error.retry_after_s or 0.0, _LONGEST_BACK_OFF_S)
                        if record.attempts <= self.retries:
                            record.attempts += 1
                            await asyncio.sleep(back_off_s or 0.1)
                            answer = MeasuredAnswer(keep_text)
                            level.running[record.number] = record, answer
                            continue
                break
        except asyncio.CancelledError:
            failure = RequestFailed("stopped", "the run was ended before the answer")
            raise
        finally:
            del level.running[record.number]
            _note(record, answer, failure, level.began_s, loop.time())
            level.records.append(record)
        if failure is None:
            return answer
        if level.schedule.concurrency and back_off_s:
            await asyncio.sleep(back_off_s)  # a closed loop that is told to wait leaves its place empty
        return None

    def _text(self, conversation: PlannedConversation, position: int, turn: PlannedTurn) -> str:
        words = self.ruler.words_for(turn.input_tokens, with_overhead=position == 0)
        own = f"{conversation.seed}/{position}"
        if not turn.blocks:
            return prompts.text(own, words)
        words_per_block = self.ruler.words_for(TRACE_BLOCK_TOKENS, with_overhead=False)
        return prompts.block_text(turn.blocks, words, words_per_block, str(conversation.prefix), own)


def _note(
    record: RequestRecord, answer: MeasuredAnswer, failure: RequestFailed | None, began_s: float, now_s: float
) -> None:
    """Write down how the request went, with its times counted from the beginning of the level."""
    record.end_s = now_s - began_s
    record.chunk_times_s.extend(time_s - began_s for time_s in answer.chunk_times_s)
    record.input_tokens = answer.prompt_tokens
    record.cached_tokens = answer.cached_tokens
    record.completion_tokens = answer.completion_tokens
    record.finish_reason = answer.finish_reason
    if failure is not None:
        record.error, record.error_detail = failure.kind, str(failure)


@contextmanager
def _light_garbage_collection() -> Iterator[None]:
    """A full collection in the middle of a run would show up as a gap between tokens: take what exists out."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
