"""What requests wait for after /ready that is made on first use: kernels compiled and loaded, graphs captured.

    python benchmarks/gpu_cold.py --model qwen3-0.6b --json results/gpu_cold.json

The engine is made and warmed up as `cumulo serve` does before it says ready; then requests of random length arrive,
greedy and sampled, and every step's time on the host is taken apart: a step of a shape that was played before, the
first of its shape, and the one that is captured. Weights are random.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import FILE, random_decoder  # noqa: E402
from cumulo.engine.assembly import free_memory, start_engine  # noqa: E402
from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.memory.memory_plan import plan_memory  # noqa: E402
from cumulo.engine.play.runner_cuda import CudaRunner  # noqa: E402
from cumulo.spec.from_huggingface import spec_from_config  # noqa: E402

MUST_MS = 50.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-warm-up", action="store_true", help="to compare with")
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    compiled: list[tuple[float, str]] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(
        (time.perf_counter(), fn.name)
    )
    spec = spec_from_config(FILE["models"][chosen.model])
    config = EngineConfig(max_context=8192, kv_memory_gib=16, max_running=256).settled("cuda")
    began_s = time.perf_counter()
    memory = plan_memory(spec, 0, config, free_memory(config))
    engine, player = start_engine(random_decoder(spec), config, memory)
    runner = player.runner
    assert isinstance(runner, CudaRunner)
    made_s = time.perf_counter()
    if not chosen.no_warm_up:
        runner.warm_up(lambda _: None)
    engine.add([0], SamplingParams(max_tokens=2, ignore_eos=True, temperature=0))
    while engine.has_work:
        engine.step()
    ready_s = time.perf_counter()
    print(f"{chosen.model}: model and engine {made_s - began_s:.1f} s, warm-up {ready_s - made_s:.1f} s, "
          f"{len(compiled)} kernels compiled or loaded", flush=True)  # fmt: skip
    before = len(compiled)
    waits: list[tuple[float, str, str]] = []
    launches = runner.launches
    play = launches.play

    def timed(shape: Any, captured: bool) -> None:
        graphs, seen, kernels = len(launches.graphs), shape in launches.seen, len(compiled)
        if not (seen and launches.graphs.get(shape)):
            torch.cuda.synchronize()  # a full queue of launches also makes the host wait: that is not meant
        start_s = time.perf_counter()
        play(shape, captured)
        kind = "captured" if len(launches.graphs) > graphs else "known" if seen else "first of its shape"
        names = ",".join(name for _, name in compiled[kernels:])
        waits.append((time.perf_counter() - start_s, kind, f"{shape} {names}"))

    launches.play = timed  # type: ignore[method-assign]
    draw = random.Random(chosen.seed)
    left, finished = chosen.requests, 0
    while left or engine.has_work:
        while left and len(engine.scheduler.running) < draw.choice((1, 4, 16, 64, 256)):
            length = int(2 ** draw.uniform(0, 12))
            params = SamplingParams(
                max_tokens=int(2 ** draw.uniform(0, 8)), ignore_eos=True, seed=left,
                temperature=draw.choice((0.0, 1.0)), top_p=draw.choice((1.0, 0.9)),
            )  # fmt: skip
            engine.add([draw.randrange(spec.vocab_size) for _ in range(length)], params)
            left -= 1
            if draw.random() < 0.3:
                break
        for done in engine.step().finished:
            assert done.error is None, done.error
            finished += 1
    rows: list[dict[str, Any]] = []
    for kind in ("known", "first of its shape", "captured"):
        times = sorted(1e3 * seconds for seconds, what, _ in waits if what == kind)
        if times:
            row = dict(steps=len(times), p50_ms=times[len(times) // 2], max_ms=times[-1])
            rows.append({"name": kind, "must": MUST_MS, "ok": times[-1] <= MUST_MS, **row})
            print(f"{kind}: {row}", flush=True)
    print(f"{finished} requests; kernels compiled or loaded after ready: {len(compiled) - before}")
    for seconds, kind, what in sorted(waits, reverse=True)[:8]:
        print(f"  {1e3 * seconds:.1f} ms {kind} {what}")
    if chosen.json:
        machine = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
