"""What products of models that no table knows lose on a GPU: the kernel and tiles that `linear` takes by rule,
against the best that `tune` finds for the very shape.

    python benchmarks/gpu_default_tiles.py --json results/gpu_default_tiles.json

The rules were chosen looking at the first models; the held-out ones were not looked at.
"""

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from cumulo.kernels.cuda.linear import linear as door
from cumulo.kernels.cuda.linear import tune
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us

# hidden, outputs of query, key and value, inputs of the output product, width of the feed-forward, vocabulary
MODELS = {
    "Qwen2.5-7B": (3584, 4608, 3584, 18944, 152064),
    "Qwen2.5-1.5B": (1536, 2048, 1536, 8960, 151936),
    "Qwen2.5-0.5B": (896, 1152, 896, 4864, 151936),
    "Llama-3.2-3B": (3072, 5120, 3072, 8192, 128256),
    "Phi-3-mini": (3072, 9216, 3072, 8192, 32064),
    "Gemma-2-2B": (2304, 4096, 2048, 9216, 256000),
    "Qwen3-4B": (2560, 6144, 4096, 9728, 151936),
    "Qwen3-14B": (5120, 7168, 5120, 17408, 151936),
    "Llama-2-7B": (4096, 12288, 4096, 11008, 32000),
    "Phi-4": (5120, 7680, 5120, 17920, 100352),
}
HELD_OUT = {
    "Qwen2.5-3B": (2048, 2560, 2048, 11008, 151936),
    "Mistral-Nemo-12B": (5120, 6144, 4096, 14336, 131072),
    "Falcon3-7B": (3072, 5120, 3072, 23040, 131072),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--models", default=",".join(MODELS | HELD_OUT))
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = [int(m) for m in chosen.rows.split(",")]
    shapes = {  # of the layers; a head is so large that any kernel reads it at the memory's speed
        name: [
            one for one in tune.products(name, *(MODELS | HELD_OUT)[name]) if not one.name.endswith("head")
        ]
        for name in chosen.models.split(",")
    }
    started_s = time.monotonic()
    work = [(product, "bf16") for products in shapes.values() for product in products]
    compiled = tune.compile_all(work, rows, max(1, min(14, (os.cpu_count() or 2) - 1)))
    print(f"{compiled} kernels compiled in {time.monotonic() - started_s:.0f} s", flush=True)
    door.prepare("cuda")
    gc.freeze()  # capturing a graph collects garbage, which takes longer than a measurement
    found = []
    for name, products in shapes.items():
        for product in products:
            if time.monotonic() - started_s > chosen.seconds:
                print("time is up", flush=True)
                break
            found += compare(name, product, rows)
        if mine := [row for row in found if row["model"] == name]:
            summary(name, mine)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


def compare(model: str, product: tune.Product, rows: list[int]) -> list[dict]:
    generator = torch.Generator("cuda").manual_seed(0)
    first = tune._weight(product, "bf16", "cuda", generator)
    weights = [first] + [first.clone() for _ in range(copies_past_cache(first.nbytes, limit=32) - 1)]
    found = []
    for m in rows:
        key = door.shape_key(m, product.n, product.k, "bf16", product.swiglu)
        call = tune.TunedCall.random(product, m, "cuda", generator)
        times: dict[door.Choice, float] = {}
        default = door._default(m, product.n, product.k, "bf16", product.swiglu)
        for choice in (default, *tune.candidates(product, m, "bf16")):
            door.WINNERS[key] = choice
            try:
                times[choice] = graph_us(lambda i, call=call: call(weights[i]), len(weights), rounds=5)
            except Exception:  # the device refuses it
                continue
        del door.WINNERS[key]
        best = min(times, key=lambda choice: times[choice])
        row = {"model": model, "product": product.name.removeprefix(f"{model} "), "n": product.n, "k": product.k,
               "rows": m, "default_us": round(times[default], 2), "best_us": round(times[best], 2),
               "default": default.kernel, "best": f"{best.kernel} {best.config}",
               "all": {f"{one.kernel} {one.config or ''}": round(us, 2) for one, us in times.items()}}  # fmt: skip
        found.append(row)
        over = times[default] / times[best]
        print(f"{model:16} {row['product']:8} m={m:<3} {row['default_us']:7.1f} us by {row['default']:7}, best "
              f"{row['best_us']:7.1f} ({over:.2f})  {row['best']}", flush=True)  # fmt: skip
    return found


def summary(model: str, rows: list[dict]) -> None:
    """How much longer all products of a step take, for each number of rows, and the worst of them."""
    parts = []
    for m in sorted({row["rows"] for row in rows}):
        mine = [row for row in rows if row["rows"] == m]
        whole = sum(row["default_us"] for row in mine) / sum(row["best_us"] for row in mine)
        parts.append(f"{m}: {whole:.2f}")
    worst = max(row["default_us"] / row["best_us"] for row in rows)
    held = ", held out" if model in HELD_OUT else ""
    print(
        f"== {model}{held}: a layer's products by rule over the best, by rows {', '.join(parts)}; "
        f"the worst one {worst:.2f}"
    )


if __name__ == "__main__":
    main()
