"""What adapters cost a decoding step on a GPU: the 8B shape in random weights, 64 sequences, no adapter, one for
all, and many.

    python benchmarks/gpu_lora.py --json results/gpu_lora.json
"""

import argparse
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
from cumulo.spec.from_huggingface import spec_from_config  # noqa: E402

MUST = 1.15


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--targets", default="", help="only matrices with this in their names: attention, ffn"
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    spec = spec_from_config(FILE["models"][chosen.model])
    config = EngineConfig(
        max_context=1024, kv_memory_gib=8, max_loras=chosen.adapters, max_lora_rank=chosen.rank
    ).settled("cuda")
    memory = plan_memory(spec, 0, config, free_memory(config))
    engine, player = start_engine(random_decoder(spec), config, memory)
    runner = player.runner
    assert isinstance(runner, CudaRunner) and runner.model.adapters is not None
    bank = runner.model.adapters.bank
    for name, matrix in bank.matrices.items():
        if chosen.targets not in name:
            continue
        matrix.stack.a.normal_(0, matrix.matrix.inputs**-0.5)
        matrix.stack.b.normal_(0, 0.02)
        matrix.stack.ranks.fill_(chosen.rank)
        matrix.stack.device_ranks.fill_(chosen.rank)
    runner.model.adapters.look_again()
    for index in range(chosen.adapters):
        engine.scheduler.books.adapters.place(f"a{index}", f"a{index}", chosen.rank, f"print {index}", "")
    print(f"{chosen.model}: {player.runs_on}, {bank.nbytes / 2**30:.2f} GiB of adapters", flush=True)
    counts = (0, 1, chosen.adapters)
    times: dict[int, list[float]] = {count: [] for count in counts}
    for count in counts:  # compiles and captures
        step_ms(engine, chosen.rows, count, spec.vocab_size)
        step_ms(engine, chosen.rows, count, spec.vocab_size)
    for _, count in itertools.product(range(3), counts):
        times[count].append(step_ms(engine, chosen.rows, count, spec.vocab_size))
    rows: list[dict[str, Any]] = []
    for count in counts:
        value = statistics.median(times[count])
        ratio = value / statistics.median(times[0])
        rows.append({"adapters": count, "ms_per_step": round(value, 3), "of a step without": round(ratio, 3)})
        print(rows[-1], flush=True)
    print(f"must: {MUST} with {chosen.adapters} adapters of rank {chosen.rank}, {chosen.rows} sequences")
    if chosen.json:
        machine = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
