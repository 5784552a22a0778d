"""Where the time of a decoding step goes, on one rank and on two ranks that share one GPU, by kind of kernel.

    nvidia-cuda-mps-control -d        # lets kernels of two processes run side by side
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/gpu_rank_steps.py --models qwen3-0.6b

Models, engines and layouts are those of `gpu_ranks.py`. A kind is the folder of `cumulo/kernels/cuda` that contains
the kernel; matrix products of CUDA's library count as `linear`, and all others as `torch`. `collective` is what
ranks do for each other, and includes the time in which one waits for the other. `between` is the step's time less
that of all kernels: gaps between kernels, and the host's work that no kernel hides. Steps are timed without the
profiler, kernels with it.
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_ranks import MODELS, engine_of, model_spec, step_ms  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.layout.serving import ServingLayout  # noqa: E402
from cumulo.ranks.start import run_ranks  # noqa: E402

STEPS = 32
KERNELS = ROOT / "cumulo" / "kernels" / "cuda"
FOLDERS = ("collective", "linear", "moe", "elementwise", "attention", "sampling")
LIBRARY = re.compile("nvjet|gemm|gemv|cutlass|splitk", re.IGNORECASE)


def folders() -> dict[str, str]:
    """Of every Triton kernel; where two folders have one of a name, the one that a greedy decoding step uses."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for path in sorted((KERNELS / folder).glob("*.py")):
            for name in re.findall(r"@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+)", path.read_text("utf-8")):
                found.setdefault(name, folder)
    return found


def kind_of(kernel: str, known: dict[str, str]) -> str:
    return known.get(kernel) or ("linear" if LIBRARY.search(kernel) else "torch")


def kernels_us(engine: Engine, rows: int, vocabulary: int, profiles: bool) -> dict[str, tuple[float, float]]:
    """(microseconds, launches) in a decoding step of so many sequences, by kind of kernel. Every rank steps, one of
    them profiles."""
    engine.scheduler.pool.clear_cache()
    params = SamplingParams(temperature=0, max_tokens=STEPS + 24, ignore_eos=True)
    for index in range(rows):
        engine.add([index % vocabulary] * 128, params)
    for _ in range(16):  # the prompts, too
        engine.step()
    torch.cuda.synchronize()
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    if profiles:
        known = folders()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS):
                engine.step()
            torch.cuda.synchronize()
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kind = spent[kind_of(event.name, known)]
                kind[0] += event.device_time / STEPS
                kind[1] += 1 / STEPS
    while engine.has_work:
        engine.step()
    return {kind: (us, launches) for kind, (us, launches) in spent.items()}


def play(
    rank: int, name: str, layout: ServingLayout, invariant: bool, counts: tuple[int, ...]
) -> dict[int, tuple[float, dict[str, tuple[float, float]]]]:
    torch.cuda.set_device(0)
    spec = model_spec(name)
    engine = engine_of(spec, rank, layout, invariant, 2048)
    found = {}
    for rows in counts:
        for _ in range(2):  # the first captures
            engine.scheduler.pool.clear_cache()
            step = step_ms(engine, rows, spec.vocab_size)
        found[rows] = step, kernels_us(engine, rows, spec.vocab_size, rank == 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--kinds", default="plain,invariant")
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--alone", action="store_true", help="one rank only")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one engine")
    chosen = parser.parse_args()
    counts = tuple(int(one) for one in chosen.rows.split(","))
    for name in chosen.models.split(","):
        several = ServingLayout(tp=2, ep=1 if model_spec(name).moe is None else 2)
        for kind in chosen.kinds.split(","):
            for layout in (ServingLayout(),) if chosen.alone else (ServingLayout(), several):
                found = run_ranks(
                    play, layout.world, name, layout, kind == "invariant", counts, timeout_s=chosen.timeout
                )
                for rows, (step, spent) in found[0].items():
                    between = 1e3 * step - sum(us for us, _ in spent.values())
                    parts = ", ".join(
                        f"{one} {us:.0f} ({launches:.0f})" for one, (us, launches) in sorted(spent.items())
                    )
                    print(f"{name}, {kind}, {layout}, {rows} rows: step {step:.3f} ms; µs (launches): {parts}, "
                          f"between {between:.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
