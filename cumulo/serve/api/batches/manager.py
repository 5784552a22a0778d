"""Batches: all batches of this server, and the files they read and write. Made by `create_app`, started by Service.

Each key has a line of batches and one of them runs at a time, so one key's batches wait only for each other. What
is on disk is enough to go on after a restart.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from typing import get_args
from weakref import WeakValueDictionary

import msgspec
from starlette.types import ASGIApp

from cumulo.base.files import write_whole
from cumulo.serve.access.keys import Caller
from cumulo.serve.api.batches.run import BatchRun
from cumulo.serve.api.batches.schemas import BatchRecord, BatchRequest, Status
from cumulo.serve.api.batches.store import FileStore, newest_of, owned
from cumulo.serve.errors import ApiError, invalid
from cumulo.serve.service import Service

log = logging.getLogger(__name__)

MAX_UNFINISHED_PER_KEY = 100
MAX_BATCHES_PER_KEY = 1000  # the oldest that has ended is forgotten; its files stay


class Batches:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        options = service.options
        self.store = FileStore(options.files, options.files_per_key_bytes, options.files_bytes)
        self.uploads: Counter[str] = Counter()  # running now, by key
        self._records: dict[str, BatchRecord] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by key
        self._running: set[asyncio.Task[None]] = set()
        self._current: dict[str, BatchRun] = {}  # by batch
        self._writing = asyncio.Lock()
        for path in sorted(self.store.folder.glob("batch_*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
            except (OSError, msgspec.DecodeError) as error:
                log.error("%s is passed over: it does not describe a batch (%s)", path, error)
                continue
            self._records[record.id] = record
        self._show()

    # -- life ---------------------------------------------------------------------------------------------
    def start(self) -> None:
        """The engine is up: go on with what a server before this one has left."""
        unfinished = [record for record in self._records.values() if not record.ended]
        for record in sorted(unfinished, key=lambda record: record.created_at):
            log.info("batch %s is resumed", record.id)
            self._enqueue(record)

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self.store.close()

    def _enqueue(self, record: BatchRecord) -> None:
        task = asyncio.create_task(self._run_in_turn(record))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run_in_turn(self, record: BatchRecord) -> None:
        """One key's batches run one after the other."""
        turn = self._turns.setdefault(record.owner, asyncio.Lock())
        async with turn:
            await self._run(record)

    async def _run(self, record: BatchRecord) -> None:
        if record.ended or record.id in self._current:
            return
        run = self._current[record.id] = BatchRun(record, self.app, self.service, self.store, self.change)
        try:
            await run.run()
        except Exception as error:
            await run.fail(error)
        finally:
            del self._current[record.id]

    # -- asking -------------------------------------------------------------------------------------------
    def get(self, batch_id: str, owner: str) -> BatchRecord:
        return owned(self._records, batch_id, owner, "batch", "/v1/batches")

    def owned_by(self, owner: str) -> list[BatchRecord]:
        """The batches of one key, newest first."""
        return newest_of(self._records, owner)

    def reader_of(self, file_id: str) -> str | None:
        """The unfinished batch that reads this file."""
        for record in self._records.values():
            if record.input_file_id == file_id and not record.ended:
                return record.id
        return None

    # -- changing -----------------------------------------------------------------------------------------
    async def create(self, owner: str, body: BatchRequest, let_in: Caller | None = None) -> BatchRecord:
        """`let_in`: the caller, where a gateway has checked the key."""
        stored = self.store.get(body.input_file_id, owner)
        if stored.purpose != "batch":
            raise invalid(
                f"the file {stored.id} has the purpose {stored.purpose!r}; a batch reads files of purpose 'batch'",
                "input_file_id",
                "invalid_value",
            )
        own = self.owned_by(owner)
        if sum(not record.ended for record in own) >= MAX_UNFINISHED_PER_KEY:
            raise ApiError(
                429,
                f"this key has {MAX_UNFINISHED_PER_KEY} unfinished batches: wait for one to end, or cancel one",
                code="too_many_batches",
                retry_after_s=60,
            )
        self.store.check_count(owner)
        with self.store.claiming(owner) as claim:
            claim(1)  # where there is no room for results, it says so now
        for oldest in [record for record in reversed(own) if record.ended][
            : len(own) + 1 - MAX_BATCHES_PER_KEY
        ]:
            del self._records[oldest.id]
            (self.store.folder / f"{oldest.id}.json").unlink(missing_ok=True)
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            let_in=let_in,
            endpoint=body.endpoint,
            input_file_id=stored.id,
            metadata=body.metadata,
        )
        self._records[record.id] = record
        await self.change(record, "validating")
        self._enqueue(record)
        return record

    async def cancel(self, record: BatchRecord) -> None:
        if record.status == "cancelling":
            return
        if record.status not in ("validating", "in_progress"):
            raise invalid(
                f"the batch is {record.status} and can no longer be cancelled", code="invalid_status"
            )
        await self.change(record, "cancelling")
        if (run := self._current.get(record.id)) is not None:
            run.stop()
        else:  # it waits for another of its key's: it need not wait for its end
            await self._run(record)

    async def change(self, record: BatchRecord, status: Status) -> None:
        record.status = status
        if status != "validating" and getattr(record, f"{status}_at") is None:
            setattr(record, f"{status}_at", int(time.time()))
        async with self._writing:  # what is encoded last is written last
            content = msgspec.json.encode(record)
            await asyncio.to_thread(write_whole, self.store.folder / f"{record.id}.json", content, 0o600)
        self._show()

    def _show(self) -> None:
        counts = Counter(record.status for record in self._records.values())
        for status in get_args(Status):
            self.service.metrics.series("batches", status).set(counts[status])
