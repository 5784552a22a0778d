"""The GPU table: every model and workload of `workloads.json` on one GPU, against what vLLM reached on the
same kind.

    python benchmarks/gpu.py --models qwen3-0.6b,llama-3.1-8b --json results/gpu.json

Weights are random, shapes are real. Prompts are random tokens, drawn anew for every repeat; outputs are sampled at
temperature 1, so that a mixture's routing stays as varied as real text's; sequences end by length only. Beside each
figure stands the roofline of the very steps that ran: for every step the larger of the bytes it must read (weights
that are hit, keys and values) over the measured bandwidth and its FLOPs over the measured matrix rate.
"""

import argparse
import gc
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_roofline import Roofline  # noqa: E402
from cumulo.bench.gpu.report import Ceilings  # noqa: E402
from cumulo.engine.assembly import free_memory, start_engine  # noqa: E402
from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.decide.plan import StepPlan  # noqa: E402
from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.engine.memory.memory_plan import plan_memory  # noqa: E402
from cumulo.models.decoder import Decoder  # noqa: E402
from cumulo.spec.from_huggingface import spec_from_config  # noqa: E402
from cumulo.spec.model import ModelSpec  # noqa: E402

FILE = json.loads((Path(__file__).parent / "workloads.json").read_text())
# (model, workload) -> (vLLM 0.26, must, aim); output tokens/s, or seconds where less is better.
TARGETS: dict[tuple[str, str], tuple[float | None, float, float | None]] = {
    ("qwen3-0.6b", "mixed256"): (20657, 21000, 30000),
    ("qwen3-0.6b", "single"): (407, 800, 1200),
    ("qwen3-0.6b", "batch512"): (25831, 26000, 35000),
    ("qwen3-0.6b", "prefill8k"): (0.248, 0.25, 0.20),
    ("qwen3-0.6b", "prefix"): (1.57, 1.5, 1.0),
    ("llama-3.1-8b", "mixed256"): (9685, 9700, 11000),
    ("llama-3.1-8b", "single"): (202, 225, 250),
    ("llama-3.1-8b", "batch512"): (10309, 10300, 12000),
    ("llama-3.1-8b", "prefill8k"): (1.64, 1.65, 1.5),
    ("llama-3.1-8b fp8", "single"): (284, 290, 380),
    ("llama-3.1-8b fp8", "batch512"): (14124, 14100, 17000),
    ("llama-3.1-8b int4", "single"): (None, 450, None),
    ("llama-3.1-8b int4", "batch16"): (None, 3500, None),
    ("llama-3.1-8b int4", "batch512"): (None, 9500, None),
    ("qwen3-30b-a3b", "mixed256"): (6011, 6000, 9000),
    ("qwen3-30b-a3b", "single"): (237, 240, 350),
    ("qwen3-30b-a3b", "batch512"): (11417, 11400, 14000),
}
WEIGHT_BYTES = {"": 2, "fp8": 1, "int4": 0.53}
IN_SECONDS = ("prefill8k", "prefix")
START_TARGET = (114.0, 30.0, 10.0)


def random_decoder(spec: ModelSpec, seed: int = 0) -> Decoder:
    decoder = Decoder(spec, torch.bfloat16, "cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    for parameter in decoder.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    return decoder


def requests_of(workload: dict[str, Any], vocabulary: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt, output length): lengths from the workload's own seed, tokens from the repeat's."""
    lengths, tokens = random.Random(workload["seed"]), random.Random(seed)
    shared = [tokens.randrange(vocabulary) for _ in range(workload.get("shared_prefix", 0))]
    made = []
    for _ in range(workload["seqs"]):
        prompt = lengths.randint(*workload["prompt"])
        output = lengths.randint(*workload["output"])
        made.append((shared + [tokens.randrange(vocabulary) for _ in range(prompt)], output))
    return made


@dataclass
class Latencies:
    """What clients of a run would have seen."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between tokens of one answer

    def row(self) -> dict[str, list[float]]:
        """Milliseconds, p50 and p99."""
        found = {}
        for name, values in (("ttft_ms", self.ttft_s), ("itl_ms", self.gaps_s)):
            if values:
                found[name] = [round(1e3 * float(v), 3) for v in np.percentile(values, (50, 99))]
        return found


def watch(engine: Engine, requests: list[tuple[list[int], int]]) -> Latencies:
    """A run of its own, whose tokens are taken one by one."""
    seen, last = Latencies(), {}
    started_s = time.perf_counter()
    for prompt, output in requests:
        params = SamplingParams(temperature=1.0, max_tokens=output, ignore_eos=True)
        engine.add(prompt, params, stream=True)
    while engine.has_work:
        for delta in engine.step().deltas:
            now_s = time.perf_counter()
            if delta.token_ids:
                before_s = last.get(delta.request_id)
                (seen.ttft_s if before_s is None else seen.gaps_s).append(now_s - (before_s or started_s))
                last[delta.request_id] = now_s
    return seen


def run(engine: Engine, roofline: Roofline, requests: list[tuple[list[int], int]]) -> tuple[float, int]:
    """Seconds from the first request to the last token, and tokens made."""
    submit = engine.runner.submit

    def submitting(plan: StepPlan) -> Any:
        roofline.add_step(plan)
        return submit(plan)

    engine.runner.submit = submitting  # type: ignore[method-assign]
    torch.cuda.synchronize()
    made = 0
    started_s = time.perf_counter()
    for prompt, output in requests:
        engine.add(prompt, SamplingParams(temperature=1.0, max_tokens=output, ignore_eos=True))
    while engine.has_work:
        for done in engine.step().finished:
            assert done.error is None, done.error
            made += len(done.samples[0].token_ids)
    elapsed_s = time.perf_counter() - started_s
    engine.runner.submit = submit  # type: ignore[method-assign]
    return elapsed_s, made


def measure(
    name: str, workloads: list[str], repeats: int, ceilings: Ceilings, options: dict[str, Any]
) -> list[dict]:
    base, _, weights = name.partition(" ")
    spec = spec_from_config(FILE["models"][base])
    decoder = random_decoder(spec)
    context = min(4096 + 5000, spec.max_context)
    config = EngineConfig(max_context=context, weights=weights or "auto", **options).settled("cuda")
    weight_bytes = sum(p.nbytes for p in decoder.parameters())
    memory = plan_memory(spec, 0, config, free_memory(config))  # the weights are there already
    engine, player = start_engine(decoder, config, memory)
    print(
        f"{name}: {player.runs_on}, {weight_bytes / 2**30:.1f} GiB, {memory.kv_blocks:,} blocks", flush=True
    )
    rows = []
    for workload in workloads:
        best_s, tokens, best_floor_s, steps = float("inf"), 0, 0.0, 0
        times = []
        for repeat in range(repeats + 1):  # the first one warms up: compiles and captures
            engine.scheduler.pool.clear_cache()
            roofline = Roofline(spec, ceilings, WEIGHT_BYTES[weights], spec.kv_bytes_per_token(2))
            elapsed_s, made = run(
                engine, roofline, requests_of(FILE["workloads"][workload], spec.vocab_size, repeat)
            )
            times.append(round(elapsed_s, 3))
            if repeat and elapsed_s < best_s:
                best_s, tokens, best_floor_s, steps = elapsed_s, made, roofline.floor_s, roofline.steps
        engine.scheduler.pool.clear_cache()
        seen = watch(engine, requests_of(FILE["workloads"][workload], spec.vocab_size, repeats + 1))
        rows.append(row(name, workload, best_s, tokens, best_floor_s, steps) | seen.row())
        print(f"   {rows[-1]}  (all: {times})", flush=True)
    player.runner.close()
    del engine, player, decoder
    gc.collect()
    torch.cuda.empty_cache()
    return rows


def row(name: str, workload: str, seconds: float, tokens: int, floor_s: float, steps: int) -> dict[str, Any]:
    vllm, must, aim = TARGETS.get((name, workload), (None, None, None))
    in_seconds = workload in IN_SECONDS
    value = round(seconds, 3) if in_seconds else round(tokens / seconds, 1)
    ok = None if must is None else (value <= must if in_seconds else value >= must)
    return {
        "name": f"{name} {workload}", "value": value, "unit": "s" if in_seconds else "tok/s",
        "better": "lower" if in_seconds else "higher", "vllm": vllm, "must": must, "aim": aim, "ok": ok,
        "roofline_percent": round(100 * floor_s / seconds, 1), "steps": steps, "ms_per_step": round(1e3 *
        seconds / steps, 3), }  # fmt: skip


# -- start-up -------------------------------------------------------------------------------------------------
def save_random(name: str, folder: Path) -> None:
    """A model folder as a user would have it: config.json and sharded safetensors."""
    from safetensors.torch import save_file

    from cumulo.models.files.names_huggingface import placements

    spec = spec_from_config(FILE["models"][name])
    (folder / "config.json").write_text(json.dumps(FILE["models"][name]))
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    number, size = 0, 0
    generator = torch.Generator("cuda").manual_seed(0)

    def flush() -> None:
        nonlocal number, size
        if shard:
            file = f"model-{number:05d}.safetensors"
            save_file(shard, str(folder / file))
            index.update(dict.fromkeys(shard, file))
            shard.clear()
            number, size = number + 1, 0

    for placement in placements(spec):
        tensor = torch.empty(placement.shape, dtype=torch.bfloat16, device="cuda")
        tensor.normal_(
            0.0, placement.shape[-1] ** -0.5, generator=generator
        ) if tensor.dim() > 1 else tensor.fill_(1.0)
        shard[placement.source] = tensor.cpu()
        size += tensor.nbytes
        if size > 4 << 30:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


FIRST_TOKEN = """
import sys, time
sys.path.insert(0, {root!r})
from cumulo.engine.assembly import assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
engine = assemble({folder!r}, EngineConfig(max_context=9096), False, None, with_tokenizer=False).engine
engine.add(list(range(1, 129)), SamplingParams(temperature=1.0, max_tokens=1))
while engine.has_work:
    for done in engine.step().finished:
        assert done.error is None, done.error
        print("first token", done.samples[0].token_ids, flush=True)
"""


def measure_start(name: str, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save_random(name, Path(folder))
        torch.cuda.empty_cache()
        times = []
        for _ in range(repeats + 1):  # the first one fills the caches
            started_s = time.perf_counter()
            code = FIRST_TOKEN.format(root=str(ROOT), folder=folder)
            subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
            times.append(time.perf_counter() - started_s)
    best = round(min(times[1:]), 1)
    vllm, must, aim = START_TARGET
    print(f"   start to first token, {name}: {[round(t, 1) for t in times]} s", flush=True)
    return {"name": f"{name} process start to first token", "value": best, "unit": "s", "better": "lower",
            "vllm": vllm, "must": must, "aim": aim, "ok": best <= must, "cold": round(times[0], 1)}  # fmt: skip


def attention_rows() -> list[dict[str, Any]]:
    """The kernels of the table, in microseconds; `cumulo bench kernels` has all of them, with their rivals."""
    from cumulo.bench.gpu import report

    rows = report.rows(("paged_attention", "flash_attention"))
    return [
        row.as_dict() | {"roofline_percent": 100 * row.more.get("roofline_share", 0.0)}
        for row in rows
        if row.must is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="qwen3-0.6b,llama-3.1-8b,llama-3.1-8b fp8,llama-3.1-8b int4,qwen3-30b-a3b"
    )
    parser.add_argument("--workloads", default="", help="left out: those with a target")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--start", action="store_true", help="also process start to first token of the 8B model"
    )
    parser.add_argument(
        "--attention", action="store_true", help="also the attention kernels that have a target"
    )
    parser.add_argument("--json", default="")
    parser.add_argument("--no-graphs", action="store_true")
    chosen = parser.parse_args()
    ceilings = Ceilings.measured()
    rates = {
        "copy_tb_s": round(ceilings.bytes_per_s / 1e12, 2),
        "bf16_tflop_s": round(ceilings.bf16_flops_per_s / 1e12),
        "fp8_tflop_s": round((ceilings.fp8_flops_per_s or 0) / 1e12),
    }
    print(f"ceilings: {rates}", flush=True)
    rows: list[dict[str, Any]] = []
    for name in [part.strip() for part in chosen.models.split(",") if part.strip()]:
        wanted = [w for w in FILE["workloads"] if (name, w) in TARGETS]
        if chosen.workloads:
            wanted = chosen.workloads.split(",")
        try:
            rows += measure(name, wanted, chosen.repeats, ceilings, {"cuda_graphs": not chosen.no_graphs})
        except Exception as error:  # one model's failure must not lose the others' rows
            import traceback

            traceback.print_exc()
            rows.append({"name": name, "error": f"{type(error).__name__}: {error}"})
    if chosen.attention:
        try:
            rows += attention_rows()
        except Exception as error:
            rows.append({"name": "attention", "error": f"{type(error).__name__}: {error}"})
    if chosen.start:
        rows.append(measure_start("llama-3.1-8b", chosen.repeats))
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    } | rates  # fmt: skip
    try:
        import triton

        machine["triton"] = triton.__version__
    except ImportError:
        pass
    for entry in rows:
        print(entry)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
