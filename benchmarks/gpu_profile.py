"""Where a workload's GPU time goes, kernel by kernel: `python benchmarks/gpu_profile.py qwen3-0.6b prefill8k
[--skip 0.5]`.

The profile is of the second run, when everything is compiled and captured.
"""

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
import gpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="as gpu.py names it, such as 'llama-3.1-8b int4'")
    parser.add_argument("workloads", help="one or several, with commas")
    parser.add_argument("--rows", type=int, default=14)
    parser.add_argument("--max-steps", type=int, default=60, help="profiled; a workload may have a thousand")
    parser.add_argument("--skip-steps", type=int, default=0, help="not profiled before them")
    chosen = parser.parse_args()
    base, _, weights = chosen.model.partition(" ")
    spec = gpu.spec_from_config(gpu.FILE["models"][base])
    config = gpu.EngineConfig(max_context=9096, weights=weights or "auto").settled("cuda")
    decoder = gpu.random_decoder(spec)
    engine, player = gpu.start_engine(
        decoder, config, gpu.plan_memory(spec, 0, config, gpu.free_memory(config))
    )
    ceilings = gpu.Ceilings(4.3e12, 8e14, 1.5e15)
    for workload in chosen.workloads.split(","):
        roofline = gpu.Roofline(spec, ceilings, 2, spec.kv_bytes_per_token(2))
        gpu.run(engine, roofline, gpu.requests_of(gpu.FILE["workloads"][workload], spec.vocab_size, 0))
        engine.scheduler.pool.clear_cache()
        for prompt, output in gpu.requests_of(gpu.FILE["workloads"][workload], spec.vocab_size, 1):
            engine.add(prompt, gpu.SamplingParams(temperature=1.0, max_tokens=output, ignore_eos=True))
        for _ in range(chosen.skip_steps):
            engine.step()
        torch.cuda.synchronize()
        started_s, steps = time.perf_counter(), 0
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            while engine.has_work and steps < chosen.max_steps:
                engine.step()
                steps += 1
            torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - started_s)
        totals: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                spent, count = totals[event.name]
                totals[event.name] = spent + event.device_time / 1e3, count + 1
        busy = sum(spent for spent, _ in totals.values())
        print(f"{chosen.model} {workload}: {steps} steps, {wall_ms:.1f} ms wall, {busy:.1f} ms of kernels")
        for name, (spent, count) in sorted(totals.items(), key=lambda item: -item[1][0])[: chosen.rows]:
            share, each_us = 100 * spent / busy, 1e3 * spent / count
            print(f"  {spent:9.2f} ms {share:5.1f}%  {count:6d} x {each_us:8.1f} us  {name[:90]}")
        while engine.has_work:
            engine.step()
        engine.scheduler.pool.clear_cache()
    player.runner.close()


if __name__ == "__main__":
    main()
