"""Training speed on one device: tokens/s, MFU and peak memory of a 1.2B model, by variant.

    python benchmarks/train_speed.py --variants 4,4+compile,8+compile --json results/train.json
    python benchmarks/train_speed.py --tiny                # a small model, where there is no GPU

A variant is a micro-batch and what is switched on: `compile` (each layer by torch.compile), `recompute`. Tokens and
targets are random and weights are drawn as for a new model, so gradients are real. MFU counts 3 × the forward pass,
attention as a causal mask shows it, over the device's data sheet (cumulo/train/meter.py).
"""

import argparse
import gc
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from cumulo.spec.counting import parameter_count
from cumulo.spec.model import ModelSpec
from cumulo.train.config import OptimizerConfig
from cumulo.train.initialise import initialise
from cumulo.train.meter import peak_flops, training_flops_per_token
from cumulo.train.model import TrainingDecoder
from cumulo.train.optimizer import Optimizer
from cumulo.train.packing import Batch
from cumulo.train.step import compute_gradients

LARGE = ModelSpec(
    "llama", vocab_size=128256, hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn_hidden=8192,
    max_context=4096, rope_theta=500000.0, tied_embeddings=True,
)  # fmt: skip
TINY = ModelSpec(
    "llama", vocab_size=1024, hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn_hidden=256,
    max_context=256, tied_embeddings=True,
)  # fmt: skip
# transformers + torch.compile, a plain hand-written model with compiled blocks; then our bars.
PEERS = {"transformers": 50_500, "plain torch": 63_300}
MUST, AIM, MUST_GIB = 66_000, 75_000, 50.0


def random_batch(spec: ModelSpec, rows: int, length: int, seed: int) -> Batch:
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, spec.vocab_size, (rows, length))
    targets = chance.integers(0, spec.vocab_size, (rows, length))
    positions = np.broadcast_to(np.arange(length), (rows, length)).copy()
    starts = np.arange(0, rows * length + 1, length, dtype=np.int32)
    return Batch(tokens, targets, positions, starts, rows * length)


def measure(spec: ModelSpec, length: int, variant: str, steps: int, device: torch.device) -> dict[str, Any]:
    size, *options = variant.split("+")
    micro_batch = int(size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = TrainingDecoder(spec, dtype, device, recompute="recompute" in options)
    parameters = dict(model.named_parameters())
    initialise(parameters, spec, seed=0)
    if "compile" in options:
        for layer in model.layers.values():
            layer.compile()
    optimizer = Optimizer(parameters, OptimizerConfig(learning_rate=1e-4), spec, masters=False)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times_s, losses = [], []
    for step in range(steps + 3):  # the first ones compile and allocate
        batch = random_batch(spec, micro_batch, length, step)
        wait()
        begin = time.perf_counter()
        losses.append(compute_gradients(model, optimizer, batch, micro_batch, 0.0, device).loss)
        optimizer.clip()
        optimizer.step(1.0)
        optimizer.zero_grad()
        wait()
        times_s.append(time.perf_counter() - begin)
    step_s = float(np.median(times_s[3:]))
    tokens_per_s = micro_batch * length / step_s
    memory_gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    peak, source = peak_flops(device, dtype)
    large = spec is LARGE and device.type == "cuda"
    return {
        "name": variant, "value": tokens_per_s, "unit": "tokens/s", "better": "higher",
        "must": MUST if large else None, "aim": AIM if large else None,
        "ok": tokens_per_s >= MUST and (memory_gib or 0) <= MUST_GIB if large else None,
        "mfu": tokens_per_s * training_flops_per_token(spec, length) / peak, "peak": source,
        "memory_gib": memory_gib, "step_ms": step_s * 1e3, "losses": [losses[0], losses[-1]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="4,4+compile,8+compile", help="comma-separated")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="a small model and short sequences")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec, length = (TINY, 256) if options.tiny else (LARGE, 4096)
    print(f"{parameter_count(spec) / 1e9:.2f}B parameters, sequences of {length}, peers {PEERS} tokens/s")
    rows = []
    for variant in options.variants.split(","):
        try:
            row = measure(spec, length, variant, options.steps, device)
        except torch.OutOfMemoryError:
            row = {"name": variant, "value": None, "ok": False, "note": "out of memory"}
        rows.append(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if row["value"] is not None:
            memory = f"{row['memory_gib']:.1f} GiB, " if row["memory_gib"] else ""
            print(
                f"{variant:16} {row['value']:10,.0f} tokens/s, {100 * row['mfu']:.1f}% MFU, {memory}"
                f"{row['step_ms']:.1f} ms, loss {row['losses'][0]:.3f} -> {row['losses'][1]:.3f}",
                flush=True,
            )
        else:
            print(f"{variant:16} {row['note']}", flush=True)
    if options.json is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
        machine = {"device": name, "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
