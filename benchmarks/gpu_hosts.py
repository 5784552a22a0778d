"""Ranks and roles of several hosts, played on one GPU: does NCCL come up and play inside a graph, do two ranks that
exchange messages over gloo say what one rank says, and how fast does KV travel from GPU to GPU over TCP?

    python benchmarks/gpu_hosts.py --json FILE

Ranks have addresses of their own (127.0.0.2 and so on), as if each were on another host. NCCL refuses two ranks on
one GPU, so it is tried with one. Loopback has no network card: the ceiling of TCP is measured in the same run.
"""

import argparse
import gc
import json
import multiprocessing
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu import FILE, random_decoder
from benchmarks.gpu_rank_answers import agreement
from benchmarks.gpu_ranks import answers, slice_of
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.scheduler import Scheduler
from cumulo.engine.decide.scheduler_config import SchedulerConfig
from cumulo.engine.decide.transfer.orders import Landed
from cumulo.engine.decide.transfer.travel import BlockRuns
from cumulo.engine.engine import Engine
from cumulo.engine.link import connect as connect_roles
from cumulo.engine.play.player import Player
from cumulo.engine.play.rank_play import SharedGuides
from cumulo.engine.play.rank_player_cuda import make_cuda_runner
from cumulo.engine.play.runner_cuda import CudaRunner
from cumulo.engine.play.transfer_staged import PAGE_BYTES, StagedExport, StagedSource
from cumulo.kernels.cuda.captured import CapturedGraphs
from cumulo.layout.serving import ServingLayout, rank_part
from cumulo.models.batch import KVCache
from cumulo.models.play.cuda_decoder import CudaDecoder
from cumulo.models.play.rank_links import connect
from cumulo.ranks.device_group import NcclGroup, has_nccl
from cumulo.ranks.mirrored_memory import MirroredMemory, bring
from cumulo.ranks.rank_group import meeting_point
from cumulo.ranks.start import run_ranks
from cumulo.spec.from_huggingface import spec_from_config
from cumulo.spec.model import ModelSpec

MODEL, RANK_LAYERS, ROLE_LAYERS = "qwen3-0.6b", 5, 28
BLOCK, SLOTS, STEP = 64, 16, 512
PROMPT, CONTEXT, CHUNK = 8192, 8448, 2048  # of the transfer
REPEATS = 5
DEVICE = torch.device("cuda")
SPAWN = multiprocessing.get_context("spawn")


def spec_of(layers: int) -> ModelSpec:
    return replace(spec_from_config(FILE["models"][MODEL]), layers=layers)


# -- NCCL ------------------------------------------------------------------------------------------------------
def nccl_of_one() -> dict[str, Any]:
    """A group of one rank: eager, and inside a graph that is replayed with other numbers."""
    if not has_nccl():
        return {"nccl": "this PyTorch has none"}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    began_s = time.perf_counter()
    group = NcclGroup(meeting_point(), "one", (0,), 0, 60.0, device)
    met_s = time.perf_counter() - began_s
    memory = MirroredMemory(1 << 20, group, device)
    shown = memory.carve((4096,), torch.float32)
    given, out = torch.zeros(4096, device=device), torch.zeros(4096, device=device)

    def step() -> None:
        shown.own.copy_(given * 2)
        bring(memory, shown, shown.own)
        total = shown.own + 1
        group._group.allreduce([total]).wait()
        group.largest(total)
        out.copy_(total)

    graphs: CapturedGraphs[str] = CapturedGraphs()
    step()
    graph, right = graphs.capture("step", step), []
    for turn in range(3):
        given.fill_(float(turn))
        graph.replay()
        torch.cuda.synchronize()
        right.append(bool((out == 2 * turn + 1).all()))
    beginning, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    beginning.record()
    for _ in range(200):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())), "met s": round(met_s, 2),
        "replays right": all(right), "graph us": round(1e3 * beginning.elapsed_time(end) / 200, 1),
    }  # fmt: skip


# -- ranks -----------------------------------------------------------------------------------------------------
def rank_engine(spec: ModelSpec, rank: int, layout: ServingLayout, invariant: bool) -> Engine:
    part = rank_part(spec, layout, rank)
    decoder, context, blocks = slice_of(spec, part), 512, SLOTS * 512 // BLOCK
    decoder.rotary.serve(context)
    if layout.world == 1:
        model = CudaDecoder(decoder, STEP, SLOTS, batch_invariant=invariant)
        cache = KVCache(decoder.spec, blocks, BLOCK, torch.bfloat16, DEVICE)
        runner = CudaRunner(model, cache, max_slots=SLOTS, max_context=context)
    else:
        world, name = _get_default_store(), f"port {invariant}"
        if rank == 0:
            store = meeting_point()
            world.set(name, str(store.port))
        else:
            store = meeting_point(int(world.get(name)))
        links = connect(part, store, 120.0, host=f"127.0.0.{rank + 2}")
        config = EngineConfig(
            device="cuda", dtype="bfloat16", block_size=BLOCK, max_running=SLOTS, max_tokens_per_step=STEP,
            batch_invariant=invariant, tp=layout.tp, pp=layout.pp, rank_backend="gloo",
        )  # fmt: skip
        memory: Any = SimpleNamespace(kv_blocks=blocks, max_context=context, all_host_blocks=0)
        guides = SharedGuides(None, links)
        runner = make_cuda_runner(config, memory, part, decoder, store, (), guides, links, DEVICE)
    scheduler = SchedulerConfig(
        blocks=blocks, block_size=BLOCK, max_context=context, max_running=SLOTS, max_tokens_per_step=STEP
    )
    return Engine(Scheduler(scheduler), runner, None, vocab_size=spec.vocab_size)


def say(rank: int, layout: ServingLayout, tokens: int) -> dict[str, Any]:
    """Greedy and sampled answers in both modes; every rank plans alike, because all draw the same tokens."""
    torch.cuda.set_device(0)
    spec, found = spec_of(RANK_LAYERS), {}
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, spec.vocab_size, (24 + 5 * i,), generator=generator).tolist() for i in range(16)
    ]
    for invariant in (True, False):
        engine = rank_engine(spec, rank, layout, invariant)
        began_s = time.perf_counter()
        greedy = answers(engine, prompts, tokens, temperature=0.0)
        elapsed_s = time.perf_counter() - began_s
        sampled = answers(engine, prompts[:4], tokens, temperature=0.8)
        exact = answers(engine, prompts[:2], 4, temperature=0.0, logprobs=2)
        found[invariant] = {
            "greedy": [one.token_ids for one in greedy], "sampled": [one.token_ids for one in sampled],
            "logprobs": [[entry.logprob for entry in one.logprobs or ()] for one in exact],
            "tok/s": round(len(prompts) * tokens / elapsed_s),
        }  # fmt: skip
        engine.runner.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return found


def compare_ranks(limit_s: float) -> dict[str, Any]:
    tokens, rows = 32, {}
    one = run_ranks(say, 1, ServingLayout(), tokens, timeout_s=limit_s)[0]
    two, other = run_ranks(say, 2, ServingLayout(tp=2), tokens, timeout_s=limit_s)
    for invariant in (True, False):
        ours, theirs = two[invariant], one[invariant]
        share, diverged = agreement(ours["greedy"], theirs["greedy"])
        rows["batch-invariant" if invariant else "default"] = {
            "greedy agreement %": round(share, 2), "answers that diverge": diverged,
            "sampled alike": ours["sampled"] == theirs["sampled"],
            "log-probabilities' bits alike": ours["logprobs"] == theirs["logprobs"],
            "both ranks draw the same": ours["greedy"] == other[invariant]["greedy"]
            and ours["sampled"] == other[invariant]["sampled"],
            "tok/s": ours["tok/s"], "one rank tok/s": theirs["tok/s"],
        }  # fmt: skip
    return rows


# -- rates -----------------------------------------------------------------------------------------------------
def filled_cache(spec: ModelSpec, seed: int) -> KVCache:
    cache = KVCache(spec, PROMPT // BLOCK, BLOCK, torch.bfloat16, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for storage in (cache.key_storage, cache.value_storage):
        storage.normal_(generator=generator)
    torch.cuda.synchronize()
    return cache


def serve_rates(word: Connection) -> None:
    """The sender's process: first plain bytes from page-locked memory, then a cache on the GPU."""
    cache = filled_cache(spec_of(ROLE_LAYERS), 1)
    export, page = StagedExport(cache), torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        word.send(listener.getsockname()[1])
        plain, _ = listener.accept()
        view = memoryview(page.numpy())
        with plain:
            while plain.recv(1):
                for _ in range(_pages(cache)):
                    plain.sendall(view)
        blocks, _ = listener.accept()
        blocks.recv(1)  # the greeting
        export.serve(blocks)


def _pages(cache: KVCache) -> int:
    return (cache.key_storage.nbytes + cache.value_storage.nbytes) // PAGE_BYTES


def best_of(work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began_s)
    return min(found)


def rates(limit_s: float) -> dict[str, Any]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=serve_rates, args=(theirs,), daemon=True)
    process.start()
    spec = spec_of(ROLE_LAYERS)
    cache, like = filled_cache(spec, 2), filled_cache(spec, 1)
    size, found = cache.key_storage.nbytes + cache.value_storage.nbytes, {}
    page = torch.empty(PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
    keys = cache.key_storage.view(torch.uint8).view(-1)[:PAGE_BYTES]
    pages = _pages(cache)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(pages):
            target.copy_(source, non_blocking=True)

    found["pinned, GPU to host GB/s"] = size / best_of(lambda: copy(page, keys)) / 1e9
    found["pinned, host to GPU GB/s"] = size / best_of(lambda: copy(keys, page)) / 1e9
    if not ours.poll(limit_s):
        raise SystemExit("the sender did not start")
    port, view = ours.recv(), memoryview(page.numpy())
    with socket.create_connection(("127.0.0.1", port)) as plain:

        def receive() -> None:
            plain.sendall(b"x")
            for _ in range(pages):
                left = view
                while len(left):
                    left = left[plain.recv_into(left) :]

        found["loopback TCP GB/s"] = size / best_of(receive) / 1e9
    source = StagedSource(cache, f"tcp:127.0.0.1:{port}", b"x")
    blocks = cache.blocks
    orders = {"in a row": list(range(blocks)), "scattered": torch.randperm(blocks).tolist()}
    for name, order in orders.items():
        runs = BlockRuns.joined((block, block) for block in order)
        layers = source.turn_layers

        def transfer(runs: BlockRuns = runs, layers: int = layers) -> None:
            for layer in range(0, spec.layers, layers):
                source.read(layer, runs, min(layers, spec.layers - layer))
            source.settle()

        cache.key_storage.zero_()
        found[f"KV, blocks {name} GB/s"] = size / best_of(transfer) / 1e9
        same = torch.equal(cache.key_storage, like.key_storage)
        found[f"{name}: every bit"] = same and torch.equal(cache.value_storage, like.value_storage)
    source.close()
    process.join(10)
    process.kill()
    return {"GB": round(size / 1e9, 3)} | {
        name: round(one, 2) if isinstance(one, float) else one for name, one in found.items()
    }


# -- roles -----------------------------------------------------------------------------------------------------
def role_engine() -> tuple[Engine, CudaRunner]:
    spec = spec_of(ROLE_LAYERS)
    decoder = random_decoder(spec)
    decoder.rotary.serve(CONTEXT)
    model = CudaDecoder(decoder, CHUNK, SLOTS, batch_invariant=True)
    blocks = 6 * CONTEXT // BLOCK
    cache = KVCache(spec, blocks, BLOCK, torch.bfloat16, DEVICE)
    runner = CudaRunner(model, cache, max_slots=SLOTS, max_context=CONTEXT)
    scheduler = SchedulerConfig(
        blocks=blocks, block_size=BLOCK, max_context=CONTEXT, max_running=SLOTS, max_tokens_per_step=CHUNK
    )
    return Engine(Scheduler(scheduler), runner, None, vocab_size=spec.vocab_size), runner


def long_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 50_000, (PROMPT + 1,), generator=generator).tolist() for _ in range(4)]


def link_of(engine: Engine, runner: CudaRunner, **role: Any) -> Any:
    config = EngineConfig(device="cuda", transfer_key="a-key-of-the-benchmark", **role)
    engine.scheduler.pool.clear_cache()
    connect_roles(engine, Player(runner, "GPU"), config, MODEL)
    return engine.link


def prefill(word: Connection) -> None:
    engine, runner = role_engine()
    answers(engine, long_prompts()[:1], 1, temperature=0.0)  # compiles
    link = link_of(engine, runner, role="prefill", transfer_address="tcp:127.0.0.1:0")
    word.send(link._sender.address)
    while not word.poll():
        if not engine.has_work or engine.idle:
            select.select([link], [], [], 0.01)
        engine.exchange()
        if engine.has_work:
            engine.step()
    link.close()


def decode(limit_s: float) -> dict[str, Any]:
    """The same prompts without and with the split, by one engine."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=prefill, args=(theirs,), daemon=True)
    process.start()
    engine, runner = role_engine()
    prompts, tokens = long_prompts(), 16
    alone = [one.token_ids for one in answers(engine, prompts, tokens, temperature=0.0)]
    if not ours.poll(limit_s):
        raise SystemExit("the prefill engine did not start")
    link = link_of(engine, runner, role="decode", prefill_engines=(f"p0={ours.recv()}",))
    news, landed = link._receiver.news, list[Landed]()
    take = news.take_all

    def heard() -> list[Any]:
        found = take()
        landed.extend(one for one in found if isinstance(one, Landed))
        return found

    news.take_all = heard
    transfers = engine.scheduler.transfers
    while not transfers.peers:
        select.select([link], [], [], 1.0)
        engine.exchange()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=7)
    ids, said = [engine.add(prompt, params).id for prompt in prompts], dict[str, list[int]]()
    deadline_s = time.monotonic() + limit_s
    while (engine.has_work or transfers.active) and time.monotonic() < deadline_s:
        if engine.idle or not engine.has_work:
            select.select([link], [], [], 0.01)
        engine.exchange()
        if engine.has_work:
            said |= {o.request_id: o.samples[0].token_ids for o in engine.step().finished}
    ours.send("end")
    split = [said.get(one, []) for one in ids]
    seconds = sum(one.copying_s for one in landed)
    rate = sum(one.copied_bytes for one in landed) / seconds / 1e9 if seconds else 0.0
    link.close()
    process.join(10)
    process.kill()
    return {
        "prompts": len(prompts), "by transfer": transfers.landed, "failed": transfers.failed,
        "answers alike": sum(a == b for a, b in zip(split, alone, strict=True)),
        "GB/s while copying": round(rate, 2), "tail ms": [round(1e3 * one.tail_s, 1) for one in landed],
        "problems": len(engine.scheduler.problems()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write all figures there")
    parser.add_argument("--only", help="nccl, ranks, rates or roles")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds that each part may take")
    chosen = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "ranks": lambda: compare_ranks(chosen.limit),  # first: its processes are forked before CUDA starts here
        "nccl": nccl_of_one, "rates": lambda: rates(chosen.limit), "roles": lambda: decode(chosen.limit),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if chosen.only in (None, name):
            began_s = time.perf_counter()
            try:
                found[name] = part()
            except Exception as error:  # the other parts are worth having
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"== {name} ({time.perf_counter() - began_s:.0f} s)", flush=True)
            for key, value in found[name].items():
                print(f"   {key:32} {value}", flush=True)
            if chosen.json:
                Path(chosen.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
