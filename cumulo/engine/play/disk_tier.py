"""TierMover and KvFiles: write KV blocks of host memory to files of a folder and read them back, in threads of
their own. The engine's loop takes the news in between two steps; no step ever waits for a disk. Engines of a
host may share a folder.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import queue
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cumulo.base.files import sampled_digest
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.kv_tiers import (
    KEPT_FILES,
    FilesRead,
    FilesSeen,
    FileWritten,
    ReadFiles,
    TierEvent,
    WriteFile,
)
from cumulo.engine.decide.plan import StepPlan
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.play.mailbox import Mailbox
from cumulo.engine.play.swap_pool import SwapPool
from cumulo.errors import ConfigError
from cumulo.spec.model import ModelSpec

_LAYOUT = "layers, heads, tokens, dimensions; keys, then values"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".json")


def kv_fingerprint(path: Path, spec: ModelSpec, config: EngineConfig, runs_on: str) -> bytes:
    """`runs_on`: which code computes, since other kernels round differently."""
    state = blake2b(digest_size=16, person=b"cumulo-kv-model")
    facts = {
        "spec": dataclasses.asdict(spec),
        "layout": _LAYOUT,
        "runs_on": runs_on,
        **{name: getattr(config, name) for name in ("device", "dtype", "kv_dtype", "weights", "block_size")},
    }
    state.update(json.dumps(facts, sort_keys=True, default=str).encode())
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in _WEIGHTS)
    for file in files:
        state.update(f"{file.suffix} {file.stat().st_mtime_ns} ".encode())
        state.update(sampled_digest(file))
    return state.digest()


log = logging.getLogger(__name__)

_MAGIC = b"CUMULOKV"
_VERSION = 1
_HEAD = struct.Struct("<8sI16s16sQ")  # magic, version, fingerprint, block hash, bytes that follow the digest
_DIGEST_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{32}\.kv")
_FORGOTTEN_S = 600.0  # after which a file that was being written is nobody's
_TELL_EVERY_S = 60.0


class KvFiles:
    def __init__(self, root: Path, fingerprint: bytes, limit_bytes: int) -> None:
        self.root, self.folder, self._fingerprint = root, root / fingerprint.hex(), fingerprint
        self.limit_bytes, self.used_bytes = limit_bytes, 0
        self._told_s = float("-inf")
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            probe = self.folder / f".probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"kv_disk: files cannot be written to {root} ({error.strerror}); name a folder that this user "
                "can write to"
            ) from error

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self.folder / name[:2] / f"{name}.kv"

    # -- single blocks ------------------------------------------------------------------------------------
    def write(self, block_hash: bytes, parts: Sequence[bytes]) -> bool:
        """False: the disk did not take it. Nothing is left behind then."""
        path = self._path(block_hash)
        size = sum(len(part) for part in parts)
        head = _HEAD.pack(_MAGIC, _VERSION, self._fingerprint, block_hash, size)
        aside = path.with_name(f".{path.stem}.{os.getpid()}")
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            aside.touch(mode=0o600)
            with aside.open("wb") as file:
                file.write(head)
                file.write(_digest(head, parts))
                for part in parts:
                    file.write(part)
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            if error.errno == errno.ENOSPC:
                self.trim(int(self.used_bytes * KEPT_FILES))
            self._tell("KV blocks cannot be written to %s: %s", self.root, error.strerror)
            return False
        self.used_bytes += size + len(head) + _DIGEST_BYTES
        if self.used_bytes > self.limit_bytes:
            self.trim(int(self.limit_bytes * KEPT_FILES))
        return True

    def read(self, block_hash: bytes, size: int) -> memoryview | None:
        """The block's bytes; None: there is no such file, or it is not what it should be."""
        path = self._path(block_hash)
        try:
            data = path.read_bytes()
            os.utime(path)  # used now: the oldest are deleted first
        except OSError:
            return None
        start = _HEAD.size + _DIGEST_BYTES
        expected = _HEAD.pack(_MAGIC, _VERSION, self._fingerprint, block_hash, size)
        whole = memoryview(data)
        good = (
            len(data) == start + size
            and data[: _HEAD.size] == expected
            and data[_HEAD.size : start] == _digest(expected, [whole[start:]])
        )
        if not good:
            self._tell("%s is damaged or belongs to another model: it is deleted", path, None)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return whole[start:]

    # -- the folder ---------------------------------------------------------------------------------------
    def scan(self) -> set[bytes]:
        """Hashes of all blocks of this model; counts what all models take, and removes what was never finished."""
        found, used = set[bytes](), 0
        for path, size, modified_s in _walk(self.root):
            if path.name.startswith("."):
                if time.time() - modified_s > _FORGOTTEN_S:
                    with contextlib.suppress(OSError):
                        path.unlink()
                continue
            used += size
            if _NAME.fullmatch(path.name) and path.parent.parent == self.folder:
                found.add(bytes.fromhex(path.stem))
        self.used_bytes = used
        if used > self.limit_bytes:
            self.trim(int(self.limit_bytes * KEPT_FILES))
        return found

    def trim(self, limit_bytes: int) -> None:
        """Delete the files that were used least recently, of whatever model, until so much is left."""
        files = sorted(
            (one for one in _walk(self.root) if not one[0].name.startswith(".")), key=lambda one: one[2]
        )
        used = sum(size for _, size, _ in files)
        for path, size, _ in files:
            if used <= limit_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                used -= size
        self.used_bytes = used

    def _tell(self, words: str, *values: object) -> None:
        """Once a minute: a full disk refuses every block."""
        if time.monotonic() - self._told_s > _TELL_EVERY_S:
            self._told_s = time.monotonic()
            log.warning(words, *[value for value in values if value is not None])


def _digest(head: bytes, parts: Iterable[memoryview | bytes]) -> bytes:
    state = blake2b(head, digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


def _walk(root: Path) -> Iterable[tuple[Path, int, float]]:
    """Files two folders down: path, bytes, when last used. What vanishes meanwhile is passed over."""
    for folder, _, names in os.walk(root):
        if Path(folder).parent.parent == root:
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    yield path, status.st_size, status.st_mtime


_LOOK_EVERY_S = 5.0  # for files of other engines,
_LOOK_SHARE = 50  # and no more often than this many times as long as it takes


class TierMover:
    def __init__(self, files: KvFiles, pool: SwapPool, scheduler: Scheduler) -> None:
        self.files, self._pool, self._scheduler = files, pool, scheduler
        self.news: Mailbox[TierEvent] = Mailbox()
        self._known = files.scan()
        tiers = scheduler.tiers
        assert tiers is not None
        self._tiers = tiers
        tiers.on_disk.update(self._known)
        self._block_bytes = sum(part.nbytes for part in self._views(0))
        self._writes: queue.SimpleQueue[WriteFile | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[ReadFiles | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"cumulo-kv-{name}", daemon=True)
            for name, target in (("writer", self._write_all), ("reader", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    # -- the engine's thread ------------------------------------------------------------------------------
    def exchange(self, now_s: float) -> None:
        """Take in what was written and read, and hand out what is ordered."""
        for event in self.news.take_all():
            self._tiers.enter_event(event, now_s)
        orders = self._tiers.orders
        for order in orders:
            if isinstance(order, WriteFile):
                self._writes.put(order)
            else:
                self._reads.put(order)
        orders.clear()

    def save(self, submit: Callable[[StepPlan], object], patience_s: float) -> None:
        """An idle engine ends: what is still on the device goes to disk, too, as far as there is time."""
        pool, ends_s = self._scheduler.pool, time.monotonic() + patience_s
        left = [(h, block) for h, block in pool.block_of.items() if h not in self._tiers.on_disk]
        index = -1
        while (left or self._tiers.writing) and time.monotonic() < ends_s:
            part, left = left[:16], left[16:]
            plan = StepPlan(index)
            self._tiers.spill(part, plan)
            if plan.swap_out:
                submit(plan)
            self._tiers.played(index)
            index -= 1
            self.exchange(0.0)
            while self._tiers.writing and time.monotonic() < ends_s:
                self.news.wait(0.1)
                self.exchange(0.0)

    def close(self) -> None:
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self.news.close()

    # -- the mover's threads ------------------------------------------------------------------------------
    def _views(self, block: int) -> list[NDArray[np.uint8]]:
        """A host block as bytes."""
        return [part.view(torch.uint8).numpy() for part in self._pool.views(block) if part.numel()]

    def _write_all(self) -> None:
        next_look_s = time.monotonic() + _LOOK_EVERY_S
        while True:
            try:
                order = self._writes.get(timeout=_LOOK_EVERY_S)
                if order is None:
                    return
                parts = [part.tobytes() for part in self._views(order.block)]
                ok = self.files.write(order.block_hash, parts)
                if ok:
                    self._known.add(order.block_hash)
                self.news.put(FileWritten(order.block_hash, order.block, ok))
            except queue.Empty:
                pass
            if (now_s := time.monotonic()) >= next_look_s:
                self._look()
                took_s = time.monotonic() - now_s
                next_look_s = now_s + max(_LOOK_EVERY_S, _LOOK_SHARE * took_s)

    def _look(self) -> None:
        found = self.files.scan()
        came, went = found - self._known, self._known - found
        self._known = found
        if came or went:
            self.news.put(FilesSeen(tuple(came), tuple(went)))

    def _read_all(self) -> None:
        while (order := self._reads.get()) is not None:
            started_s = time.perf_counter()
            good = tuple(self._read(h, block) for h, block in zip(order.hashes, order.blocks, strict=True))
            self.news.put(FilesRead(order.number, good, time.perf_counter() - started_s))

    def _read(self, block_hash: bytes, block: int) -> bool:
        data = self.files.read(block_hash, self._block_bytes)
        if data is None:
            return False
        start = 0
        for view in self._views(block):
            view[...] = np.frombuffer(data[start : start + view.nbytes], dtype=np.uint8).reshape(view.shape)
            start += view.nbytes
        return True
