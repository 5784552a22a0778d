"""What early starts bring to a step of one sequence on a GPU: shapes of models in random weights, a step as a
captured graph, in turns as `linear` chooses and with products that wait for the kernel ahead.

    python benchmarks/gpu_one_row.py --json results/gpu_one_row.json

Models have a few layers only, whose weights are several times the cache, and a small vocabulary. The rule was
chosen looking at the first models; the held-out ones were not looked at.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import random_decoder  # noqa: E402
from cumulo.kernels.cuda.compile_ahead import compiling_ahead  # noqa: E402
from cumulo.kernels.cuda.linear import linear as door  # noqa: E402
from cumulo.kernels.cuda.linear import small_linear, w4  # noqa: E402
from cumulo.models.batch import KVCache  # noqa: E402
from cumulo.models.play.cuda_decoder import CudaDecoder, StepTensors  # noqa: E402
from cumulo.spec.from_huggingface import spec_from_config  # noqa: E402

# hidden, heads, kv heads, size of a head, width of the feed-forward, layers
SEEN = {
    "SmolLM2-135M": (576, 9, 3, 64, 1536, 30),
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072, 14),
    "Qwen2.5-0.5B": (896, 14, 2, 64, 4864, 20),
    "Llama-3.2-1B": (2048, 32, 8, 64, 8192, 6),
    "Qwen2.5-3B": (2048, 16, 2, 128, 11008, 8),
    "Qwen2.5-7B": (3584, 28, 4, 128, 18944, 5),
    "Llama-3.1-8B": (4096, 32, 8, 128, 14336, 5),
}
HELD_OUT = {
    "SmolLM2-360M": (960, 15, 5, 64, 2560, 24),
    "TinyLlama-1.1B": (2048, 32, 4, 64, 5632, 8),
    "Qwen3-1.7B": (2048, 16, 8, 128, 6144, 8),
    "Gemma-2-2B": (2304, 8, 4, 256, 9216, 6),
    "Llama-3.2-3B": (3072, 24, 8, 128, 8192, 6),
    "Qwen3-4B": (2560, 32, 8, 128, 9728, 6),
}
DEFAULT = (
    *SEEN, *HELD_OUT, "Llama-3.1-8B fp8", "Llama-3.1-8B int4", "SmolLM2-360M fp8", "Llama-3.2-1B int4",
)  # fmt: skip
CONTEXT, BLOCK = 256, 64
PARTS = ("qkv", "o", "gate/up", "down")


class OneRowStep:
    """A decoder and everything that a step of one sequence needs."""

    def __init__(self, name: str) -> None:
        model, _, weights = name.partition(" ")
        hidden, heads, kv_heads, dim, ffn, self.layers = (SEEN | HELD_OUT)[model]
        spec = spec_from_config({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": dim, "intermediate_size": ffn, "vocab_size": 32000, "tie_word_embeddings": True,
            "rope_theta": 1e6, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        })  # fmt: skip
        self.model = CudaDecoder(random_decoder(spec), 1, 1, weights=weights or "auto")
        blocks = CONTEXT // BLOCK
        self.cache = KVCache(spec, blocks, BLOCK, torch.bfloat16, "cuda")

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        self.plan = self.model.attention_plan(1, 1, True, self.cache, blocks, None)
        self.starts, self.contexts, self.tables = ints(0, 1), ints(CONTEXT), ints(*range(blocks))[None]
        self.step = StepTensors(ints(7), ints(CONTEXT - 1), ints(CONTEXT - 1), ints(0), self.plan)
        layer = self.model.layers[0]
        matrices = (layer.attention.qkv, layer.output, layer.gate_up, layer.down)  # type: ignore[union-attr]
        self.weights = dict(zip(PARTS, matrices, strict=True))

    def run(self) -> Tensor:
        self.plan.prepare(self.starts, self.contexts, self.tables)
        return self.model.forward(self.step, self.cache)

    def captured(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The step, and its logits."""
        with self.model.one_layer_of_each_kind():
            with compiling_ahead():
                self.run()
            self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.run()
        graph.replay()
        torch.cuda.synchronize()
        return graph, logits.double()

    def key(self, part: str) -> str:
        weight = self.weights[part]
        assert weight is not None
        return door.shape_key(1, *weight.shape, door.kind_of(weight), part == "gate/up")

    def waiting(self, part: str) -> door.Choice:
        """The product of a part without an early start, in its kernel's own tiles."""
        weight, swiglu = self.weights[part], part == "gate/up"
        assert weight is not None
        (n, k), kind = weight.shape, door.kind_of(weight)
        if kind.startswith("w4"):
            config = w4.default_config(1, n, k, int(kind.removeprefix("w4g")), swiglu=swiglu)
            return door.Choice("w4", replace(config, early=False))
        return door.Choice(
            "small", small_linear.default_config(n, k, swiglu, 1 if kind.startswith("fp8") else 2)
        )


def in_turns_us(graphs: list[torch.cuda.CUDAGraph], turns: int) -> list[float]:
    """Median of each: clocks change while a GPU works, so they take turns."""
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(turns):
        for graph, own in zip(graphs, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(1e3 * begin.elapsed_time(end))
    return [statistics.median(own) for own in times]


@torch.inference_mode()
def measure(name: str, turns: int) -> dict[str, Any]:
    step = OneRowStep(name)
    chosen, logits = step.captured()
    graphs = [chosen]
    kept = dict(door.WINNERS)
    all_wait = {step.key(part): step.waiting(part) for part in PARTS}
    off = 0.0
    for changes in (all_wait, *({key: choice} for key, choice in all_wait.items())):
        door.WINNERS.update(changes)
        graph, other = step.captured()
        off = max(off, float((other - logits).norm() / logits.norm()))
        graphs.append(graph)
        door.WINNERS.clear()
        door.WINNERS.update(kept)
    us, waiting_us, *without_us = in_turns_us(graphs, turns)
    gains = {part: round((one - us) / step.layers, 2) for part, one in zip(PARTS, without_us, strict=True)}
    held_out = name.split(" ")[0] in HELD_OUT
    return {"model": name, "held_out": held_out, "layers": step.layers, "step_us": round(us, 1),
            "waiting_us": round(waiting_us, 1), "ratio": round(us / waiting_us, 3), "us_a_layer_by_part": gains,
            "logits_differ": round(off, 4)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(DEFAULT))
    parser.add_argument("--turns", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    started_s = time.monotonic()
    gc.freeze()  # capturing a graph collects garbage, which takes longer than a measurement
    rows = []
    for name in chosen.models.split(","):
        if time.monotonic() - started_s > chosen.seconds:
            print("time is up", flush=True)
            break
        row = measure(name, chosen.turns)
        rows.append(row)
        parts = ", ".join(f"{part} {us:+.2f}" for part, us in row["us_a_layer_by_part"].items())
        held_out = ", held out" if row["held_out"] else ""
        print(f"{name}{held_out}: {row['waiting_us']} us waiting, {row['step_us']} us ({row['ratio']:.3f}); "
              f"us a layer that each brings: {parts}; logits differ by {row['logits_differ']}",
              flush=True)  # fmt: skip
        gc.collect()
        torch.cuda.empty_cache()
    if chosen.json:
        machine = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
