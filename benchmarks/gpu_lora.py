"""What adapters cost a decoding step on a GPU: shapes of models in random weights, and in turns no adapter, one for
all sequences, and many.

    python benchmarks/gpu_lora.py --json results/gpu_lora.json
    python benchmarks/gpu_lora.py --targets all --ranks 8,16,64 --rows 1,16,64
    python benchmarks/gpu_lora.py --models qwen2.5-7b,qwen3-4b --targets all  # shapes nothing was chosen for
"""

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import FILE, random_decoder  # noqa: E402
from cumulo.engine.assembly import free_memory, start_engine  # noqa: E402
from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.engine.memory.memory_plan import plan_memory  # noqa: E402
from cumulo.engine.play.runner_cuda import CudaRunner  # noqa: E402
from cumulo.kernels.low_rank import LowRankStack  # noqa: E402
from cumulo.models.adapters.bank import AdapterBank  # noqa: E402
from cumulo.spec.from_huggingface import spec_from_config  # noqa: E402

MUST = 1.15  # of a step of 64 sequences with 32 adapters of rank 16
_QWEN = {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 32768,
         "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 151645}  # fmt: skip
HELD_OUT = {
    "qwen2.5-7b": {
        **_QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
        "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944, "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": {
        **_QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True, "attention_bias": False,
    },
}  # fmt: skip


def step_ms(engine: Engine, rows: int, adapters: int, vocabulary: int) -> float:
    """Median time between the ends of decoding steps."""
    for index in range(rows):
        prompt = [(index * 31 + token) % vocabulary for token in range(128)]
        params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
        engine.add(prompt, params, adapter=f"a{index % adapters}" if adapters else "")
    ends = []
    while engine.has_work:
        for done in engine.step().finished:
            assert done.error is None, done.error
        ends.append(time.perf_counter())
    engine.scheduler.pool.clear_cache()
    gaps = [b - a for a, b in itertools.pairwise(ends[16:-4])]
    return 1e3 * statistics.median(gaps)


def give_ranks(stack: LowRankStack, name: str, targets: str, rank: int) -> None:
    """As if every adapter changed just these matrices: "all", "q,v", or those with `targets` in their names."""
    stack.ranks.fill_(rank if targets in ("all", *name.split(".")) else 0)
    if targets == "q,v" and name.endswith("qkv"):
        stack.ranks[:, 0::2] = rank
    stack.device_ranks.copy_(stack.ranks)


def random_adapters(bank: AdapterBank) -> None:
    for matrix in bank.matrices.values():
        matrix.stack.a.normal_(0, matrix.matrix.inputs**-0.5)
        matrix.stack.b.normal_(0, 0.02)


def measure(model: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Every rank in an engine of its own, since memory is reserved for the greatest; the weights are the same."""
    spec = spec_from_config((FILE["models"] | HELD_OUT)[model])
    decoder = random_decoder(spec)
    found = []
    for rank in map(int, chosen.ranks.split(",")):
        config = EngineConfig(
            max_context=1024, kv_memory_gib=8, max_loras=chosen.adapters, max_lora_rank=rank
        ).settled("cuda")
        memory = plan_memory(spec, 0, config, free_memory(config))
        engine, player = start_engine(decoder, config, memory)
        runner = player.runner
        assert isinstance(runner, CudaRunner)
        found += measure_rank(model, rank, engine, runner, chosen)
        runner.close()
        del engine, player, runner
        gc.collect()
        torch.cuda.empty_cache()
    return found


def measure_rank(
    model: str, rank: int, engine: Engine, runner: CudaRunner, chosen: argparse.Namespace
) -> list[dict[str, Any]]:
    adapters = runner.model.adapters
    assert adapters is not None
    random_adapters(adapters.bank)
    for index in range(chosen.adapters):
        engine.scheduler.books.adapters.place(f"a{index}", f"a{index}", rank, f"print {index}", "")
    runner.warm_up(lambda _: None)
    print(f"{model}: {adapters.bank.nbytes / 2**30:.2f} GiB of adapters of rank {rank}", flush=True)
    found = []
    vocabulary = runner.model.spec.vocab_size
    # From few to many: matrices that an adapter has changed once stay in the captured steps.
    for targets, rows in itertools.product(chosen.targets.split(" "), map(int, chosen.rows.split(","))):
        for name, matrix in adapters.bank.matrices.items():
            give_ranks(matrix.stack, name, targets, rank)
        if adapters.look_again():
            runner.launches.graphs.forget(lambda shape: shape.adapters)
        counts = tuple(dict.fromkeys((0, 1, min(rows, chosen.adapters))))
        times: dict[int, list[float]] = {count: [] for count in counts}
        for count in counts:  # captures
            step_ms(engine, rows, count, vocabulary)
        for _, count in itertools.product(range(chosen.rounds), counts):
            times[count].append(step_ms(engine, rows, count, vocabulary))
        ms = {count: statistics.median(times[count]) for count in counts}
        found += [
            {"model": model, "rank": rank, "targets": targets, "rows": rows, "adapters": count,
             "ms_per_step": round(ms[count], 3), "of a step without": round(ms[count] / ms[0], 3)}
            for count in counts
        ]  # fmt: skip
        print(
            f"{model} rank {rank}, {targets}, {rows} sequences: {ms[0]:.3f} ms without adapters; "
            + ", ".join(f"{count}: {ms[count]:.3f} ({ms[count] / ms[0]:.3f})" for count in counts[1:]),
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--ranks", default="16", help="of the adapters, with commas")
    parser.add_argument("--targets", default="q,v attention all", help="matrices: all, q,v, attention, ffn")
    parser.add_argument("--rows", default="64", help="sequences of a step, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    rows = [row for model in chosen.models.split(",") for row in measure(model, chosen)]
    print(f"must: {MUST} with 32 adapters of rank 16 and 64 sequences of the 8B shape, all matrices")
    if chosen.json:
        machine = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
