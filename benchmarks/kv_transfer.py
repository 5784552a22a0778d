"""How fast KV goes from one engine's cache to another's, next to the plain copy rate of the same memory.

    python benchmarks/kv_transfer.py                                # a Unix socket and TCP, this host
    python benchmarks/kv_transfer.py --device cuda                  # CUDA IPC, one GPU, two processes

Two processes, each with a KV cache of the model's shape; the real sender, receiver and words between them. All bits
are compared. Blocks lie in a row, as in a fresh cache, or scattered, as in one that has served for long.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import numpy as np
import torch

from cumulo.base.report import Row, write_json
from cumulo.engine.decide.plan import Send
from cumulo.engine.decide.transfer.orders import (
    ComputeOrder,
    FetchOrder,
    Landed,
    OrderBegun,
    Ordered,
    PeerLoad,
    PeerLost,
    ReleaseOrder,
    TransferPlan,
)
from cumulo.engine.play.transfer_receiver import TransferReceiver
from cumulo.engine.play.transfer_sender import TransferSender
from cumulo.models.batch import KVCache
from cumulo.spec.catalog import shipped

MUST = 0.5  # of the plain copy rate


def main() -> None:
    chosen = _arguments()
    if chosen.serve:
        _serve(chosen)
        return
    ways = {"cpu": chosen.ways.split(","), "cuda": ["cuda"]}[chosen.device]
    rows = []
    for way in ways:
        rows += _measure(chosen, way)
    if chosen.json:
        write_json(chosen.json, rows)
    for row in rows:
        print(f"{row.name:44} {row.value:10.3g} {row.unit}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="llama-3.1-8b", help="a name of the catalogue")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=0, help="0: 16 on a CPU, 64 on a GPU")
    parser.add_argument("--ways", default="unix,tcp", help="on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    chosen.block_size = chosen.block_size or {"cpu": 16, "cuda": 64}[chosen.device]
    return chosen


def _cache(chosen: argparse.Namespace) -> KVCache:
    spec = shipped().model(chosen.model)
    blocks = -(-chosen.tokens // chosen.block_size) + 8
    return KVCache(spec, blocks, chosen.block_size, torch.bfloat16, chosen.device)


def _contents(storage: torch.Tensor, layer: int) -> torch.Tensor:
    """What the sender's blocks of a layer hold: every number of every block is another one than its neighbours."""
    blocks, numbers = storage.shape[1], storage[0, 0].numel()
    words = torch.arange(blocks * numbers, dtype=torch.int32, device=storage.device) * 31 + layer * 977
    return (words % 32749).to(torch.int16).view(storage.shape[1:])


# -- the sender's process -------------------------------------------------------------------------------------
def _serve(chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    cache = _cache(chosen)
    for storage in (cache.key_storage, cache.value_storage):
        for layer in range(cache.spec.layers):
            storage[layer].view(torch.int16).copy_(_contents(storage, layer))
    if chosen.device == "cuda":
        torch.cuda.synchronize()
    sender = TransferSender(cache, chosen.model, chosen.serve)
    print(sender.address, flush=True)
    needed = -(-chosen.tokens // chosen.block_size)
    orders = 0
    while True:
        sender.tell_load(PeerLoad(0, 0, 1000.0, 1))
        sender.news.wait(0.1)
        for event in sender.news.take_all():
            if isinstance(event, Ordered):
                blocks = list(range(cache.blocks))
                if event.order.request_id == "scattered":
                    random.Random(orders).shuffle(blocks)
                orders += 1
                begun = OrderBegun(event.order.number, tuple(blocks[:needed]), 0)
                sender.give([(event.key, begun)])
                # All layers are there already: what is measured is the copy.
                sender.layer_teller([Send(0, event.key, chosen.tokens)])(cache.spec.layers - 1)


# -- the receiver's -------------------------------------------------------------------------------------------
def _measure(chosen: argparse.Namespace, way: str) -> list[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        address = "tcp:127.0.0.1:0" if way == "tcp" else f"unix:{folder}/sender.sock"
        command = [sys.executable, __file__, "--serve", address, "--device", chosen.device]
        command += ["--model", chosen.model, "--tokens", str(chosen.tokens)]
        command += ["--block-size", str(chosen.block_size)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            cache = _cache(chosen)
            receiver = TransferReceiver(cache, chosen.model, [("sender", address)])
            rows = []
            for layout in ("in a row", "scattered"):
                best_s, nbytes, tail_s = _best(chosen, cache, receiver, layout)
                rate, plain = nbytes / best_s, _plain_rate(cache, nbytes, chosen.repeats)
                name = f"{way}, blocks {layout}"
                rows += [
                    Row(f"{name}: KV of {chosen.tokens} tokens", nbytes / (1 << 20), "MiB", "lower"),
                    Row(f"{name}: transfer", rate / 1e9, "GB/s", "higher"),
                    Row(f"{name}: plain copy", plain / 1e9, "GB/s", "higher"),
                    Row(f"{name}: of the plain copy", rate / plain, "", "higher", must=_must(way)),
                    Row(f"{name}: order to last block", tail_s * 1e3, "ms", "lower"),
                ]
            receiver.close()
            return rows
        finally:
            process.kill()
            process.wait()


def _must(way: str) -> float | None:
    return MUST if way == "cuda" else None


def _best(
    chosen: argparse.Namespace,
    cache: KVCache,
    receiver: TransferReceiver,
    layout: str,
) -> tuple[float, int, float]:
    """Seconds of copying, bytes, and seconds from the order to its end; the best of several."""
    clock = _clock(cache)
    needed, found = -(-chosen.tokens // chosen.block_size), []
    for repeat in range(chosen.repeats + 1):
        targets = list(range(cache.blocks))
        if layout == "scattered":
            random.Random(100 + repeat).shuffle(targets)
        number = 1000 * (layout == "scattered") + repeat + 1
        _wait(receiver, PeerLoad)
        asked_s = time.perf_counter()
        order = ComputeOrder(number, "sender", array("i", [0] * chosen.tokens), request_id=layout)
        receiver.give([order])
        begun = _wait(receiver, OrderBegun)
        plan = TransferPlan(
            number, "sender", cache.spec.layers, chosen.block_size, chosen.tokens, 0, begun.blocks,
            tuple(targets[:needed]),
        )  # fmt: skip
        began_s = clock()
        receiver.give([FetchOrder(plan)])
        landed = _wait(receiver, Landed)
        done_s = time.perf_counter()
        receiver.give([ReleaseOrder(number, "sender")])
        if repeat:  # the first one also touches fresh pages
            found.append((clock() - began_s, landed.copied_bytes, done_s - asked_s))
    _check(cache, plan)
    return min(found)


def _wait(receiver: TransferReceiver, kind):
    while True:
        receiver.news.wait(60.0)
        for event in receiver.news.take_all():
            if isinstance(event, PeerLost):
                raise SystemExit(f"the sender is lost: {event.why}")
            if isinstance(event, kind):
                return event


def _check(cache: KVCache, plan: TransferPlan) -> None:
    device = cache.key_storage.device
    targets, sources = (torch.tensor(blocks, device=device) for blocks in (plan.targets, plan.sources))
    for storage in (cache.key_storage, cache.value_storage):
        for layer in range(plan.layers):
            arrived, sent = storage[layer].view(torch.int16)[targets], _contents(storage, layer)[sources]
            if not torch.equal(arrived, sent):
                raise SystemExit(f"layer {layer} arrived with other bits than were sent")


def _clock(cache: KVCache):
    """On a CPU both copies are timed in CPU seconds of this process, so that other programs do not count. The
    receiver's thread does all the work; over TCP, half of it."""
    return time.perf_counter if cache.key_storage.is_cuda else time.process_time


def _plain_rate(cache: KVCache, nbytes: int, repeats: int) -> float:
    """Bytes a second of one copy of as much memory, on one thread or on the device."""
    size = nbytes // 2
    if cache.key_storage.is_cuda:
        source, target = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        seconds = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began_s)
        return size / min(seconds[1:])
    ours, theirs = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    seconds = []
    for _ in range(repeats):
        began_s = time.process_time()
        np.copyto(ours, theirs)
        seconds.append(time.process_time() - began_s)
    return size / min(seconds)


if __name__ == "__main__":
    main()
