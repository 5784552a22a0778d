"""Latent attention on one GPU: the kernels against PyTorch's operators, which play the same plans.

    python benchmarks/gpu_latent.py --json results/gpu_latent.json

DeepSeek-V2-Lite's shape in random weights. A row is the kernels' figure, with the operators' beside it; the former
must be the better one. `--layers` makes the model shallower, for a first look.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import random_decoder  # noqa: E402
from cumulo.engine.assembly import free_memory, start_engine  # noqa: E402
from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.engine.memory.memory_plan import plan_memory  # noqa: E402
from cumulo.models.play import cuda_decoder  # noqa: E402
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec  # noqa: E402

# (sequences, prompt, output): tokens per second count outputs; a prefill alone is in seconds.
WORKLOADS = {"single": (1, 512, 96), "batch64": (64, 512, 64), "prefill8k": (4, 8000, 1)}


def shape_of(layers: int) -> ModelSpec:
    return ModelSpec(
        "deepseek_v2", 102400, 2048, layers, 16, 16, 192, 10944, 163840, norm_eps=1e-6, rope_interleaved=True,
        mla=MLASpec(None, kv_rank=512, nope_head_dim=128, rope_head_dim=64, value_head_dim=128),
        moe=MoESpec(64, 6, 1408, shared_hidden=2816, normalise_weights=False, dense_layers=(0,)),
    )  # fmt: skip


def run_s(engine: Engine, sequences: int, prompt: int, output: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(sequences):
        tokens = torch.randint(0, 102400, (prompt,), generator=generator).tolist()
        engine.add(tokens, SamplingParams(temperature=1.0, max_tokens=output, ignore_eos=True))
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    while engine.has_work:
        for done in engine.step().finished:
            assert done.error is None, done.error
    return time.perf_counter() - started_s


def measure(spec: ModelSpec, on_kernels: bool) -> dict[str, float]:
    """Seconds by workload, the better of two runs after one that compiles and captures."""
    decoder = random_decoder(spec)
    config = EngineConfig(max_context=9000, kv_memory_gib=8).settled("cuda")
    why_not = cuda_decoder.why_not if on_kernels else lambda decoder: "asked for, to compare"
    with patch.object(cuda_decoder, "why_not", why_not):
        memory = plan_memory(spec, 0, config, free_memory(config))  # the weights are there already
        engine, player = start_engine(decoder, config, memory)
    print(player.runs_on, flush=True)
    found = {}
    for name, sizes in WORKLOADS.items():
        found[name] = min([run_s(engine, *sizes, seed) for seed in range(3)][1:])
        print(f"   {name}: {found[name]:.3f} s", flush=True)
    player.runner.close()
    del engine, player, decoder
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    spec = shape_of(chosen.layers)
    kernels = measure(spec, True)
    operators = measure(spec, False)
    rows = []
    for name, (sequences, _, output) in WORKLOADS.items():
        in_seconds = output == 1
        ours, theirs = (
            seconds if in_seconds else sequences * output / seconds
            for seconds in (kernels[name], operators[name])
        )
        rows.append({
            "name": f"deepseek-v2-lite {name}", "value": round(ours, 3), "unit": "s" if in_seconds else "tok/s",
            "better": "lower" if in_seconds else "higher", "operators": round(theirs, 3), "must": round(theirs, 3),
            "aim": None, "ok": ours <= theirs if in_seconds else ours >= theirs,
            "times_as_fast": round(operators[name] / kernels[name], 2),
        })  # fmt: skip
        print(rows[-1], flush=True)
    if chosen.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": chosen.layers}
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
