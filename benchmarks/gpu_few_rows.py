"""What the layers of a small model take on a GPU with one to eight rows, as when drafts are verified, and which
kernel computes each of its products best *among the others of a step*: the chain of a layer's kernels, all layers,
is a captured graph, weights differ from layer to layer and do not fit in the cache.

    python benchmarks/gpu_few_rows.py --json few_rows.json               # on a GPU: time everything
    python benchmarks/gpu_few_rows.py --take few_rows.json --models SmolLM2-135M --rows 4 --device "NVIDIA H200"

The first one checks every candidate against float64 (products) and against the chain as it is today, times the
chain with one part changed at a time, takes the best of each, times the whole, and compares graphs that start
kernels early with the same kernels one after the other, bit by bit. The second one writes the winners into the
device's table, which `linear` (and, with --attention, decode attention) reads.
"""

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_few_rows_chain import (  # noqa: E402
    EPS,
    MODELS,
    PARTS,
    Chain,
    Setting,
    choices,
    key,
    parts,
    using,
)
from cumulo.kernels.cuda import registry  # noqa: E402
from cumulo.kernels.cuda.attention.paged_attention_decode import DecodeConfig  # noqa: E402
from cumulo.kernels.cuda.elementwise.rope_cache import rope_cache  # noqa: E402
from cumulo.kernels.cuda.linear import linear as door  # noqa: E402
from cumulo.kernels.cuda.linear.linear import Choice, linear  # noqa: E402
from cumulo.kernels.cuda.linear.rotation import PagedRotation  # noqa: E402
from cumulo.kernels.cuda.linear.small_linear import random_bf16, reference  # noqa: E402

CLEAR = 0.995  # a winner is at least so much faster than today's choice, or noise would choose
ROUNDING = 0.15  # what all layers may make of bfloat16's rounding; products are compared one by one, too


def in_turns_us(graphs: Sequence[torch.cuda.CUDAGraph], turns: int, each: int = 3) -> list[float]:
    """Median of each: clocks change while a GPU works, so they take turns."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(turns):
        for graph, own in zip(graphs, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(each):
                graph.replay()
            end.record()
            end.synchronize()
            own.append(1e3 * begin.elapsed_time(end) / each)
    return [statistics.median(own) for own in times]


# -- what candidates compute ------------------------------------------------------------------------------------
def off(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def error_of(chain: Chain, part: str, choice: Choice) -> float:
    """Of one product on its own, against float64; of a rotated one, of its queries, keys and values."""
    shape, m, device = chain.shape, chain.m, chain.stream.device
    own = parts(shape)[part.removeprefix("rotated ")]
    generator = torch.Generator(device).manual_seed(7)
    x = random_bf16(m, own.k, device=device, generator=generator)
    weight = chain.weights[0][part.removeprefix("rotated ")]
    norm = chain.norms[0][0] if own.norm else None
    outputs = own.n // 2 if own.swiglu else own.n
    residual = random_bf16(m, outputs, device=device, generator=generator) if own.residual else None
    out = torch.full((m, outputs), float("nan"), dtype=x.dtype, device=device)
    wide = [None if one is None else one.double() for one in (norm, residual)]
    exact = reference(x.double(), weight.double(), wide[0], EPS, wide[1], own.swiglu)
    with using(shape, m, {part: choice}):
        if part != "rotated qkv":
            linear(x, weight, out, norm_weight=norm, eps=EPS, residual=residual, swiglu=own.swiglu)
            return off(out, exact)
        keys, values, other_keys, other_values = (
            torch.full_like(chain.keys[0], float("nan")) for _ in range(4)
        )
        slots = torch.arange(3, 3 + m, dtype=torch.int32, device=device) * 7
        rotation = PagedRotation(chain.cos, chain.sin, chain.positions, slots, keys, values, shape.heads)
        linear(x, weight, out, norm_weight=norm, eps=EPS, rotation=rotation)
        plain = exact.to(x.dtype)
        rope_cache(plain, chain.cos, chain.sin, chain.positions, slots, other_keys, other_values, shape.heads)
        columns = shape.heads * shape.dim
        errors = [off(out[:, :columns], plain[:, :columns].double())]
        for own_cache, other in ((keys, other_keys), (values, other_values)):
            written = ~other.isnan()
            if not torch.equal(own_cache.isnan(), ~written):
                return float("inf")
            errors.append(off(own_cache[written], other[written].double()))
        return max(errors)


def checked(chain: Chain, part: str, found: Sequence[Choice | DecodeConfig | None]) -> list[Any]:
    """The candidates that run here and are right; others are named."""
    right: list[Any] = []
    for choice in found:
        if isinstance(choice, Choice):
            try:
                error = error_of(chain, part, choice)
                torch.cuda.synchronize()
            except Exception as failure:
                print(f"  REFUSED {part} {choice}: {type(failure).__name__} {str(failure)[:200]}", flush=True)
                continue
            if not error < 1e-2:
                print(f"  WRONG {part} {choice}: relative error {error:.2g}", flush=True)
                continue
        right.append(choice)
    return right


def races(chain: Chain, setting: Setting, replays: int = 20) -> bool:
    """Whether the graph, whose kernels start early, ever computes other bits than the kernels one by one."""
    with using(chain.shape, chain.m, setting) as decode:
        chain.run(chain.plan(decode), torch.cuda.synchronize)
        alone = chain.stream.clone()
        made = chain.captured(decode)
    for _ in range(replays):
        made.graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(chain.stream, alone):
            return True
    return False


# -- timing -----------------------------------------------------------------------------------------------------
def describe(choice: Choice | DecodeConfig | None) -> str:
    if choice is None:
        return "a kernel of its own"
    if isinstance(choice, DecodeConfig):
        return "decode " + " ".join(str(value) for value in asdict(choice).values())
    values = () if choice.config is None else asdict(choice.config).values()
    return f"{choice.kernel} " + " ".join(str(int(value)) for value in values)


def measure(name: str, m: int, turns: int, deadline_s: float, verbose: bool) -> dict[str, Any]:
    shape = MODELS[name]
    chain = Chain(shape, m, shape.layers)
    today: Setting = {part: found[0] for part in PARTS if (found := choices(shape, part, m))}
    best = dict(today)
    rows: dict[str, list[tuple[float, str]]] = {}
    with using(shape, m, today) as decode:
        first = chain.captured(decode)
    (start_us,) = in_turns_us([first.graph], turns)
    for part in PARTS:
        if part not in today or time.monotonic() > deadline_s:
            continue
        if part == "qkv" and best.get("rotated qkv") is not None:
            continue  # it is not used then
        right, graphs = checked(chain, part, choices(shape, part, m)), []
        kept = []
        for choice in right:
            with using(shape, m, best | {part: choice}) as decode:
                made = chain.captured(decode)
            different = off(made.stream, first.stream.double())
            if different < ROUNDING:
                graphs.append(made)
                kept.append(choice)
            else:
                print(f"  WRONG chain {part} {describe(choice)}: differs by {different:.2g}", flush=True)
        times = in_turns_us([one.graph for one in graphs], turns)
        order = sorted(zip(times, map(describe, kept), strict=True))
        rows[part] = order
        chosen = min(range(len(times)), key=lambda index: times[index])
        if kept[0] == best[part] and times[chosen] < CLEAR * times[0]:
            best[part] = kept[chosen]
        if verbose:
            print(
                f"  {part}: now {times[0]:.1f}; " + "; ".join(f"{us:.1f} {what}" for us, what in order[:6]),
                flush=True,
            )
        del graphs
    with using(shape, m, best) as decode:
        last = chain.captured(decode)
    today_us, best_us = in_turns_us([first.graph, last.graph], 2 * turns)
    raced = races(chain, best)
    differs = off(last.stream, first.stream.double())
    print(f"{name} m={m}: today {today_us:7.1f} us, best {best_us:7.1f} us, {best_us / today_us:.3f}  "
          f"(differs by {differs:.4f}; {'RACES' if raced else 'bits repeat'})", flush=True)  # fmt: skip
    changed = {part: choice for part, choice in best.items() if choice != today[part]}
    for part, choice in changed.items():
        print(f"    {part:12} {describe(today[part])} -> {describe(choice)}", flush=True)
    table = {"linear": {}, "paged_attention": {}}  # type: dict[str, dict[str, Any]]
    for part, choice in changed.items():
        if isinstance(choice, DecodeConfig):
            table["paged_attention"][key(shape, part, m)] = asdict(choice)
        elif choice is not None:
            config = None if choice.config is None else asdict(choice.config)
            table["linear"][key(shape, part, m)] = {"kernel": choice.kernel, "config": config}
    return {"model": name, "rows": m, "layers": shape.layers, "start_us": round(start_us, 1),
            "today_us": round(today_us, 1), "best_us": round(best_us, 1), "races": raced, "differs": differs,
            "winners": table, "times_us": rows}  # fmt: skip


# -- compiling ahead --------------------------------------------------------------------------------------------
def compile_some(task: tuple[str, int, list[tuple[str, Any]]]) -> int:
    """In a process of its own: run candidates once, so that their machine code is in Triton's cache on disk."""
    name, m, found = task
    registry.load_for(registry.device_name("cuda"))
    door.prepare("cuda")
    chain = Chain(MODELS[name], m, 1)
    done = 0
    for part, choice in found:
        try:
            if isinstance(choice, Choice):
                error_of(chain, part, choice)
            else:
                chain.run(chain.plan(choice))
            torch.cuda.synchronize()
            done += 1
        except Exception:  # the measuring process says which
            continue
    return done


def compile_all(names: Sequence[str], rows: Sequence[int], processes: int) -> int:
    tasks, seen = [], set()
    for name in names:
        for m in rows:
            fresh = []
            for part in PARTS:
                for choice in choices(MODELS[name], part, m):
                    dots = (
                        isinstance(choice, Choice) and choice.kernel == "dot"
                    )  # the same for any number of rows
                    mark = (name, part, choice, 0 if dots else m)
                    if mark not in seen:
                        seen.add(mark)
                        fresh.append((part, choice))
            tasks += [(name, m, fresh[i : i + 12]) for i in range(0, len(fresh), 12)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(compile_some, tasks))


# -- taking winners over ----------------------------------------------------------------------------------------
def take(path: Path, device: str, names: Sequence[str], rows: Sequence[int], attention: bool) -> None:
    """Write the winners of a measurement into the device's table."""
    file = registry.winners_file(device)
    known = json.loads(file.read_text())
    for row in json.loads(path.read_text())["rows"]:
        if row["model"] in names and row["rows"] in rows and not row["races"]:
            for table, entries in row["winners"].items():
                if table == "linear" or attention:
                    known["tables"][table].update(entries)
                    print(f"{row['model']} m={row['rows']}: {', '.join(entries) or 'nothing'} ({table})")
    file.write_text(json.dumps(known, indent=1, sort_keys=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default="4,2,8,1")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=190.0, help="no part is begun later")
    parser.add_argument("--quiet", action="store_true", help="no line for each part")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--take", type=Path, help="a file of --json whose winners go into the device's table")
    parser.add_argument("--device", default="NVIDIA H200", help="of --take")
    parser.add_argument("--attention", action="store_true", help="of --take: decode attention's winners, too")
    chosen = parser.parse_args()
    names, rows = chosen.models.split(","), [int(m) for m in chosen.rows.split(",")]
    if chosen.take:
        take(chosen.take, chosen.device, names, rows, chosen.attention)
        return
    started_s = time.monotonic()
    registry.load_for(registry.device_name("cuda"))
    door.prepare("cuda")
    compiled = compile_all(names, rows, max(1, min(14, (os.cpu_count() or 2) - 1)))
    print(f"{compiled} candidates compiled in {time.monotonic() - started_s:.0f} s", flush=True)
    gc.freeze()  # capturing a graph collects garbage, which takes longer than a measurement
    found = []
    for name in names:
        for m in rows:
            if time.monotonic() - started_s > chosen.seconds:
                print(f"time is up before {name} m={m}", flush=True)
                continue
            found.append(measure(name, m, chosen.turns, started_s + chosen.seconds, not chosen.quiet))
            gc.collect()
            torch.cuda.empty_cache()
            if chosen.json:
                machine = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
                chosen.json.write_text(json.dumps({"machine": machine, "rows": found}, indent=1) + "\n")
    print(f"{'model':14} rows  today   best  ratio   (us of all layers)")
    for row in found:
        ratio = row["best_us"] / row["today_us"]
        print(f"{row['model']:14} {row['rows']:4} {row['today_us']:6.0f} {row['best_us']:6.0f}  {ratio:.3f}")
    print(f"{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
