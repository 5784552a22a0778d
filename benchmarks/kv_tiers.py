"""TTFT of conversations whose prefixes are five times the KV cache: computed again, from host memory, from disk.

    python benchmarks/kv_tiers.py                                              # the built-in model on the CPU
    python benchmarks/kv_tiers.py --shape llama-3.1-8b --prefix 4096           # random weights on a GPU, no disk

Every conversation asks in turn, so with a KV cache of a fifth of all prefixes each finds its own evicted. The three
engines take turns request by request (A, B, C, A, B, C ...), so that a busy machine slows all of them alike. On a
GPU products of many and of few rows round differently, so answers are compared on a CPU only.
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cumulo.base.report import Row, write_json
from cumulo.engine.assembly import free_memory, start_engine
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.llm import LLM
from cumulo.engine.memory.memory_plan import plan_memory
from cumulo.spec.catalog import shipped

PARAMS = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
MUST = {"host memory": 3.0, "disk": 1.5}
TIMES_THE_CACHE = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None)
    parser.add_argument("--shape", help="a name of the catalogue: random weights of its shape, on a GPU")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--prefix", type=int, default=512, help="tokens of each conversation so far")
    parser.add_argument("--question", type=int, default=16, help="further tokens of each request")
    parser.add_argument(
        "--rounds", type=int, default=2, help="that are measured, after one that fills the tiers"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cumulo-kv-") as folder:
        rows = _measure(chosen, folder)
    write_json(chosen.json, rows)
    for row in rows:
        bound = "" if row.must is None else f" (must {row.must:g}{'' if row.ok else ', NOT REACHED'})"
        print(f"{row.name:44} {row.value:10.2f} {row.unit}{bound}")


class _Shape:
    """An engine with random weights of a model's shape."""

    def __init__(self, name: str, config: EngineConfig) -> None:
        from benchmarks.gpu import random_decoder

        spec, settled = shipped().model(name), config.settled("cuda")
        self.spec = spec
        memory = plan_memory(spec, 0, settled, free_memory(settled))
        self._engine, _ = start_engine(random_decoder(spec), settled, memory)

    def ask(self, prompt: list[int]) -> tuple[tuple[int, ...], float]:
        self._engine.add(prompt, PARAMS)
        finished = []
        while self._engine.has_work:
            finished += self._engine.step().finished
        (output,) = finished
        return tuple(output.samples[0].token_ids), output.story.ttft_s or 0.0

    def close(self) -> None:
        pass


class _Served(LLM):
    def ask(self, prompt: list[int]) -> tuple[tuple[int, ...], float]:
        (output,) = self.generate([prompt], PARAMS)
        return tuple(output.samples[0].token_ids), output.story.ttft_s or 0.0


def _measure(chosen: argparse.Namespace, folder: str) -> list[Row]:
    on_gpu = bool(chosen.shape) or chosen.device == "cuda"
    block = 64 if on_gpu else 16
    tokens = chosen.conversations * (chosen.prefix + chosen.question)
    usual = dict(
        device="cuda" if chosen.shape else chosen.device, block_size=block,
        kv_blocks=tokens // TIMES_THE_CACHE // block, threads=chosen.threads,
        max_context=chosen.prefix + chosen.question + 8, max_running=1,
    )  # fmt: skip
    ways = {
        "computed again": {},
        "host memory": {"kv_host_gib": 8.0 if chosen.shape else 4.0},
        "disk": {"kv_disk": folder, "kv_disk_gib": 8.0},
    }
    if chosen.shape:
        del ways["disk"]
    engines = {
        way: _Shape(chosen.shape, EngineConfig(**usual, **more))
        if chosen.shape
        else _Served(chosen.model, config=EngineConfig(**usual, **more))
        for way, more in ways.items()
    }
    rng = random.Random(0)
    vocabulary = next(iter(engines.values())).spec.vocab_size
    draw = lambda count: [rng.randrange(100, vocabulary) for _ in range(count)]  # noqa: E731
    prefixes = [draw(chosen.prefix) for _ in range(chosen.conversations)]
    ttft_s: dict[str, list[float]] = {way: [] for way in ways}
    all_same = True
    for number in range(chosen.rounds + 1):
        for prefix in prefixes:
            prompt = prefix + draw(chosen.question)
            told = set()
            for way, engine in engines.items():
                tokens_of, ttft = engine.ask(prompt)
                told.add(tokens_of)
                if number:
                    ttft_s[way].append(ttft)
            all_same = all_same and len(told) == 1
        print(f"round {number} of {chosen.rounds}", file=sys.stderr, flush=True)
    for engine in engines.values():
        engine.close()
    medians = {way: statistics.median(values) for way, values in ttft_s.items()}
    rows = [Row(f"TTFT p50, {way}", 1e3 * median, "ms", "lower") for way, median in medians.items()]
    rows += [
        Row(
            f"TTFT p50, {way}, over computing again", medians["computed again"] / medians[way], "×", must=must
        )
        for way, must in MUST.items()
        if way in medians
    ]
    if not on_gpu:
        rows.append(Row("all three ways answer the same", all_same, "", must=True))
    return rows


if __name__ == "__main__":
    main()
