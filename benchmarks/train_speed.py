"""Training speed on one device: tokens/s, MFU and peak memory of a 1.2B model, by variant.

    python benchmarks/train_speed.py --variants 4,8,8+fp8,8+compile --trainer 8,8+fp8 --json results/train.json
    python benchmarks/train_speed.py --losses wide,fp8,fp8_blocks      # what 8 bits cost in loss
    python benchmarks/train_speed.py --profile 8,8+fp8      # where the time of a step goes, kernel by kernel
    python benchmarks/train_speed.py --tiny                 # a small model, where there is no GPU

A variant is a micro-batch and what is switched on: `fp8` or `fp8_blocks` (products in 8 bits), `compile` (layers by
torch.compile), `plain` (neither that nor our joined operations), `recompute`, `documents` (rows of several packed
documents).

Tokens and targets are random and weights are drawn as for a new model, so gradients are real. MFU counts 3 × the
forward pass, attention as a causal mask shows it, over the device's data sheet (cumulo/train/run/metrics.py).

`--trainer` trains the same model through the trainer, from a dataset file, with its log and an asynchronous
checkpoint, and says what that costs.
"""

import argparse
import gc
import json
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from cumulo.spec.counting import parameter_count
from cumulo.spec.model import ModelSpec
from cumulo.train.data.packing import Batch
from cumulo.train.decide.config import OptimizerConfig, TrainConfig, config_from
from cumulo.train.model.arithmetic import ARITHMETICS
from cumulo.train.model.model import TrainingDecoder
from cumulo.train.optimizer.optimizer import Optimizer
from cumulo.train.run.metrics import Ceiling, training_flops_per_token
from cumulo.train.run.trainer import Trainer
from cumulo.train.run.verify import plain_gradients

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
MUST, MUST_FP8, AIM, MUST_GIB = 66_000, 80_000, 75_000, 50.0
WARM_UP = 3  # steps, which compile and allocate


def random_batch(spec: ModelSpec, rows: int, length: int, seed: int, documents: int = 1) -> Batch:
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, spec.vocab_size, (rows, length))
    targets = chance.integers(0, spec.vocab_size, (rows, length))
    cuts = [0, *sorted(chance.choice(length - 1, documents - 1, replace=False) + 1), length]
    row = np.concatenate([np.arange(end - begin) for begin, end in pairwise(cuts)])
    starts = np.concatenate([np.array(cuts[:-1]) + number * length for number in range(rows)])
    return Batch(
        tokens, targets, np.broadcast_to(row, (rows, length)).copy(),
        np.append(starts, rows * length).astype(np.int32), rows * length,
    )  # fmt: skip


def products_of(options: list[str]) -> str:
    return next((name for name in ARITHMETICS if name in options), "wide")


class Run:
    """The model and its optimizer, one step after another."""

    def __init__(self, spec: ModelSpec, length: int, variant: str, device: torch.device) -> None:
        size, *self.options = variant.split("+")
        self.spec, self.length, self.micro_batch, self.device = spec, length, int(size), device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        known = {"fp8", "fp8_blocks", "compile", "plain", "recompute", "documents"}
        if unknown := set(self.options) - known:
            sys.exit(f"{variant}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        self.model = TrainingDecoder(
            spec, self.dtype, device, recompute="recompute" in self.options,
            arithmetic=ARITHMETICS[products_of(self.options)],
            fused=False if {"compile", "plain"} & set(self.options) else None,
        )  # fmt: skip
        parameters = dict(self.model.named_parameters())
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.normal_(0.0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
        if "compile" in self.options:
            self.model.compile_layers()
        self.optimizer = Optimizer(
            parameters, OptimizerConfig(learning_rate=1e-4), spec, master_weights=False
        )

    def batch(self, number: int) -> Batch:
        documents = 8 if "documents" in self.options else 1
        return random_batch(self.spec, self.micro_batch, self.length, number, documents)

    def step(self, batch: Batch) -> float:
        loss = plain_gradients(self.model, self.optimizer, batch, self.micro_batch, 0.0).loss
        self.optimizer.clip()
        self.optimizer.step(1.0)
        self.optimizer.zero_grad()
        return loss

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(spec: ModelSpec, length: int, variant: str, steps: int, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run = Run(spec, length, variant, device)
    batches = [run.batch(number) for number in range(WARM_UP + steps)]
    losses = [run.step(batch) for batch in batches[:WARM_UP]]
    run.wait()
    begin = time.perf_counter()
    losses += [run.step(batch) for batch in batches[WARM_UP:]]
    run.wait()
    step_s = (time.perf_counter() - begin) / steps
    return row_of(variant, spec, length, run.micro_batch * length / step_s, step_s, losses, device, run.dtype)


def row_of(
    name: str, spec: ModelSpec, length: int, tokens_per_s: float, step_s: float, losses: list[float],
    device: torch.device, dtype: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    memory_gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    ceiling = Ceiling(device, dtype)
    must = (MUST_FP8 if "fp8" in name else MUST) if spec is LARGE and device.type == "cuda" else None
    return {
        "name": name, "value": tokens_per_s, "unit": "tokens/s", "better": "higher", "must": must,
        "aim": AIM if must == MUST else None, "ok": must and tokens_per_s >= must and (memory_gib or 0) <= MUST_GIB,
        "mfu": tokens_per_s * training_flops_per_token(spec, length) / ceiling.flops, "peak": ceiling.source,
        "memory_gib": memory_gib, "step_ms": step_s * 1e3, "losses": [losses[0], losses[-1]],
    }  # fmt: skip


def measure_trainer(
    spec: ModelSpec, length: int, variant: str, steps: int, device: torch.device, where: str | None
) -> dict[str, Any]:
    """The speed over all steps but the first ones, checkpoint and log included."""
    micro_batch, *options = variant.split("+")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory(dir=where) as place:
        folder = Path(place)
        write_random_words(folder, spec.vocab_size, (steps + WARM_UP + 2) * int(micro_batch) * length)
        config: TrainConfig = config_from({
            "folder": str(folder / "run"), "steps": steps + WARM_UP, "batch_sequences": int(micro_batch),
            "micro_batch": int(micro_batch), "dtype": "bfloat16" if device.type == "cuda" else "float32",
            "device": device.type, "master_weights": False, "products": products_of(options),
            "compile": "compile" in options, "evaluate_sequences": 0,
            "model": {
                "hidden": spec.hidden, "layers": spec.layers, "heads": spec.heads, "kv_heads": spec.kv_heads,
                "head_dim": spec.head_dim, "ffn_hidden": spec.ffn_hidden, "rope_theta": spec.rope_theta,
            },
            "data": {
                "sources": [str(folder / "words.txt")], "sequence_length": length, "workers": 8,
                "tokenizer": {"start_from": str(folder / "tokenizer")},
            },
            "optimizer": {"learning_rate": 1e-4}, "schedule": {"kind": "constant", "warmup_steps": 0},
            "checkpoint": {"every_steps": steps // 3, "keep": 1},
        })  # fmt: skip
        ends = Ends()
        result = Trainer(config, watcher=ends).run()
    assert ends.vocabulary == spec.vocab_size, ends.vocabulary
    # The last step waits for the last checkpoint to be written.
    step_s = (ends.at_s[-2] - ends.at_s[WARM_UP - 1]) / (steps - 1)
    losses = [record.loss for record in result.records]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    row = row_of(
        f"{variant} by the trainer", spec, length, int(micro_batch) * length / step_s, step_s, losses, device,
        dtype,
    )  # fmt: skip
    row |= {
        "steps_ms": [1e3 * (b - a) for a, b in pairwise(ends.at_s)],
        "data_stall_s": result.data_stall_s, "checkpoint_block_s": result.checkpoint_block_s,
    }  # fmt: skip
    return row


class Ends:
    """A watcher that notes when each step ended."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.vocabulary = 0

    def preparing(self, stage: str, done: int, total: int) -> None: ...

    def begins(self, run: Trainer, first_step: int) -> None:
        self.vocabulary = run.spec.vocab_size

    def step(self, record: object, memory_bytes: int) -> None:
        self.at_s.append(time.perf_counter())

    def tell(self, message: str) -> None:
        print(f"  {message}", flush=True)


def write_random_words(folder: Path, vocabulary: int, count: int) -> None:
    """One long document of random words, each a token: `count` of them."""
    words = {f"w{number}": number for number in range(vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.ByteLevel()
    (folder / "tokenizer").mkdir()
    backend.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    drawn = np.random.default_rng(0).integers(2, vocabulary, count)
    (folder / "words.txt").write_text(" ".join(f"w{number}" for number in drawn))


def compare_losses(names: list[str], steps: int, device: torch.device) -> list[dict[str, Any]]:
    """A model of 100M parameters on the standard library's source, once with each way to multiply."""
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            config = config_from({
                "folder": folder + "/run", "steps": steps, "batch_sequences": 16, "micro_batch": 16,
                "dtype": "bfloat16", "device": device.type, "products": name,
                "model": {"hidden": 768, "layers": 12, "heads": 12, "ffn_hidden": 2048},
                "data": {"sequence_length": 1024, "workers": 8, "tokenizer": {"vocab_size": 8192}},
                "checkpoint": {"every_steps": 0}, "evaluate_sequences": 128,
            })  # fmt: skip
            result = Trainer(config).run()
        last = float(np.mean([record.loss for record in result.records[-20:]]))
        rows.append({
            "name": f"loss of 100M parameters, {name}", "value": result.held_out_loss, "unit": "nats, held out",
            "better": "lower", "last_20_steps": last, "steps": steps,
        })  # fmt: skip
        print(
            f"{name:24} held out {result.held_out_loss:.4f}, last 20 steps {last:.4f}, after {steps}",
            flush=True,
        )
    return rows


def print_profile(spec: ModelSpec, length: int, variant: str, rows: int, device: torch.device) -> None:
    run = Run(spec, length, variant, device)
    for step in range(WARM_UP):
        run.step(run.batch(step))
    batch = run.batch(WARM_UP)
    run.wait()
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    begin = time.perf_counter()
    with profile(activities=[kind]) as profiler:
        run.step(batch)
        run.wait()
    wall_ms = 1e3 * (time.perf_counter() - begin)
    totals: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in profiler.events():
        spent_us = event.device_time if device.type == "cuda" else event.self_cpu_time_total
        spent, count = totals[event.name]
        totals[event.name] = spent + spent_us / 1e3, count + 1
    busy = sum(spent for spent, _ in totals.values())
    print(f"{variant}: a step, {wall_ms:.1f} ms wall, {busy:.1f} ms of kernels")
    for name, (spent, count) in sorted(totals.items(), key=lambda item: -item[1][0])[:rows]:
        share, each_us = 100 * spent / busy, 1e3 * spent / count
        print(f"  {spent:8.2f} ms {share:5.1f}%  {count:5d} x {each_us:8.1f} us  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", default="", help="comma-separated; default without others: 4,8,8+fp8")
    parser.add_argument(
        "--trainer", default="", help="variants that the trainer trains; no documents, plain, recompute"
    )
    parser.add_argument("--profile", default="", help="variants of which one step is profiled")
    parser.add_argument(
        "--losses", default="", help="train a small model on real text with these: wide,fp8,fp8_blocks"
    )
    parser.add_argument(
        "--folder", help="where the trainer's run is kept; a disk slower than checkpoints come shows"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trainer-steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=24, help="of a profile")
    parser.add_argument("--tiny", action="store_true", help="a small model and short sequences")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.variants or options.trainer or options.profile or options.losses):
        options.variants = "2" if options.tiny else "4,8,8+fp8"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    spec, length = (TINY, 256) if options.tiny else (LARGE, 4096)
    print(f"{parameter_count(spec) / 1e9:.2f}B parameters, sequences of {length}, peers {PEERS} tokens/s")
    rows = []
    jobs: list[tuple[Callable[..., dict[str, Any]], str, int]] = [
        (measure, name, options.steps) for name in filter(None, options.variants.split(","))
    ]
    by_trainer = partial(measure_trainer, where=options.folder)
    jobs += [(by_trainer, name, options.trainer_steps) for name in filter(None, options.trainer.split(","))]
    for job, variant, steps in jobs:
        try:
            row = job(spec, length, variant, steps, device)
        except torch.OutOfMemoryError:
            row = {"name": variant, "value": None, "ok": False, "note": "out of memory"}
        rows.append(row)
        free_memory()
        print(words(row), flush=True)
    if options.losses:
        rows += compare_losses(options.losses.split(","), 200, device)
    for variant in filter(None, options.profile.split(",")):
        print_profile(spec, length, variant, options.rows, device)
        free_memory()
    if options.json is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
        machine = {"device": name, "torch": torch.__version__}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def words(row: dict[str, Any]) -> str:
    if row["value"] is None:
        return f"{row['name']:24} {row['note']}"
    memory = f"{row['memory_gib']:.1f} GiB, " if row["memory_gib"] else ""
    said = (
        f"{row['name']:24} {row['value']:10,.0f} tokens/s, {100 * row['mfu']:.1f}% MFU, {memory}"
        f"{row['step_ms']:.1f} ms, loss {row['losses'][0]:.3f} -> {row['losses'][1]:.3f}"
    )
    if "data_stall_s" in row:
        said += f", waited {row['data_stall_s']:.2f} s for data, {row['checkpoint_block_s']:.2f} s for checkpoints"
    return said


def free_memory() -> None:
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
