"""Is the serving simulator right, and how fast is it?

    python benchmarks/simulate_serving.py                    # against the GPU runs in results/gpu.json; speed
    python benchmarks/simulate_serving.py --fit              # fit the H200's constants to those runs again
    python benchmarks/simulate_serving.py --here             # run the real engine here, calibrate, predict, compare
    python benchmarks/simulate_serving.py --here --device cuda --model llama-3.1-8b

Against GPU runs: the workloads of `workloads.json` are simulated and compared in seconds; which runs the constants
were fitted to is said in each row. Here: the engine serves one trace while the time of every step is recorded;
constants are fitted to those steps; then it serves another trace, and the simulator predicts what clients see:
throughput, time to first token, time between tokens. Nothing of the second trace is known to the fit.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402
from step_cost_fit import Measured, fit, get  # noqa: E402

from cumulo.base.report import Row, write_json  # noqa: E402
from cumulo.engine.decide.plan import StepPlan  # noqa: E402
from cumulo.engine.decide.scheduler import Scheduler  # noqa: E402
from cumulo.engine.simulate.engine import simulate  # noqa: E402
from cumulo.engine.simulate.run import Arrival, StepTime  # noqa: E402
from cumulo.plan.serve.capacity import play  # noqa: E402
from cumulo.plan.serve.profile import Host, Reached, ServingProfile, shipped_profiles  # noqa: E402
from cumulo.plan.serve.replica import FORMATS, Replica  # noqa: E402
from cumulo.plan.serve.report import Percentiles, report  # noqa: E402
from cumulo.plan.serve.step_cost import StepCostModel, StepLoad, load_of  # noqa: E402
from cumulo.plan.serve.step_cost_work import Format, step_work  # noqa: E402
from cumulo.plan.serve.traffic import drawn_traffic  # noqa: E402
from cumulo.spec import catalog  # noqa: E402
from cumulo.spec.device import Device  # noqa: E402
from cumulo.spec.model import ModelSpec  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))
from simulate_serving_engine import Seen, serve_really, start_here  # noqa: E402

FILE = json.loads((Path(__file__).parent / "workloads.json").read_text())
GPU_RESULTS = Path(__file__).parent / "results" / "gpu.json"
HELD_OUT = ("qwen3-0.6b batch512", "llama-3.1-8b mixed256", "qwen3-30b-a3b mixed256")
GPU_CONSTANTS = (
    "bfloat16.bandwidth", "bfloat16.matmul", "float8.bandwidth", "float8.matmul", "experts.matmul", "layer_s",
    "batch_layer_s", "expert_layer_s", "attention", "shared_kv_speedup",
)  # fmt: skip
HERE_CONSTANTS = (
    "bandwidth",
    "matmul",
    "kv_bandwidth",
    "attention",
    "layer_s",
    "batch_layer_s",
    "draw_passes",
)


# -- against the GPU runs ----------------------------------------------------------------------------------------
def arrivals_of(workload: dict[str, Any]) -> list[Arrival]:
    """As benchmarks/gpu.py draws them: all at once, lengths from the workload's own seed."""
    lengths, shared = random.Random(workload["seed"]), workload.get("shared_prefix", 0)
    made = []
    for _ in range(workload["seqs"]):
        prompt, output = lengths.randint(*workload["prompt"]), lengths.randint(*workload["output"])
        made.append(Arrival(0.0, shared + prompt, output, ((0, shared),) if shared else ()))
    return made


def gpu_runs(path: Path = GPU_RESULTS) -> dict[str, dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    return {row["name"]: row for row in rows if "steps" in row}


def replica_of(name: str) -> tuple[Replica, str]:
    model, workload = name.rsplit(" ", 1)
    weights = "float8" if model.endswith(" fp8") else "bfloat16"
    cluster = catalog.cluster(1, "h200")
    spec = catalog.model(model.removesuffix(" fp8"))
    return Replica(spec, cluster.node, cluster.fabric, weights=weights, max_context=9096), workload


def compare_with_gpu() -> list[Row]:
    rows = []
    for name, measured in gpu_runs().items():
        replica, workload = replica_of(name)
        run, _ = replica.serve(tuple(arrivals_of(FILE["workloads"][workload])))
        measured_s = measured["steps"] * measured["ms_per_step"] / 1e3
        ratio = run.ended_s / measured_s
        how = "held out" if name in HELD_OUT else "fitted"
        note = (
            f"{how}; {run.ended_s:.3f} s against {measured_s:.3f} s; {run.steps} of {measured['steps']} steps"
        )
        rows.append(Row(f"{name}, off by", 100 * abs(ratio - 1), "%", "lower", must=7.0, note=note))
        simulated = report(run, replica.memory().kv_blocks, replica.cost().spent(run))
        for kind, spread in (("ttft", simulated.ttft_s), ("itl", simulated.itl_s)):
            if spread is None or f"{kind}_ms" not in measured:
                continue
            for percentile, predicted_s, seen_ms, must in zip(
                ("p50", "p99"), (spread.p50, spread.p99), measured[f"{kind}_ms"], (10.0, 20.0), strict=True
            ):
                off = 100 * abs(1e3 * predicted_s / seen_ms - 1)
                note = f"{how}; {1e3 * predicted_s:.4g} ms against {seen_ms:.4g}"
                rows.append(
                    Row(f"{name} {kind} {percentile}, off by", off, "%", "lower", must=must, note=note)
                )
    return rows


@dataclass
class Recorder:
    """A StepClock that only remembers what it was asked; steps of equal length keep the scheduler's order."""

    loads: list[StepLoad] = field(default_factory=list)

    def time_of(self, plan: StepPlan, shared: Any) -> StepTime:
        self.loads.append(load_of(plan, None, shared))
        return StepTime(0.0, 1e-3, 0.0)

    def decode(self, rows: int) -> None:
        return None  # step by step: every load is wanted once

    def arrival_s(self, prompt_tokens: int) -> float:
        return 0.0


# The host's constants that show in the first token: from which run's p50 each is taken.
HOST_CONSTANTS = {"prompt_submit_s": "qwen3-0.6b single", "arrival_token_s": "qwen3-0.6b prefix"}


def fit_host(profile: ServingProfile) -> ServingProfile:
    """One constant after the other, each by halving the interval in which it must be."""
    for constant, name in HOST_CONSTANTS.items():
        replica, workload = replica_of(name)
        arrivals = tuple(arrivals_of(FILE["workloads"][workload]))
        low, high, wanted_s = 0.0, 1e-2, gpu_runs()[name]["ttft_ms"][0] / 1e3
        for _ in range(24):
            middle = (low + high) / 2
            tried = replace(profile, host=replace(profile.host, **{constant: middle}))
            form = FORMATS[replica.weights]
            work = step_work(replica.spec, form)
            cost = StepCostModel(work, replica.device, tried, weights=form.weights, compute=form.compute)
            seen = report(simulate(arrivals, replica.scheduler(), cost), replica.memory().kv_blocks, {})
            assert seen.ttft_s is not None
            low, high = (middle, high) if seen.ttft_s.p50 < wanted_s else (low, middle)
        print(f"  {constant:20s} {getattr(profile.host, constant):12.6g} -> {middle:12.6g}")
        profile = replace(profile, host=replace(profile.host, **{constant: middle}))
    return profile


def fit_gpu(profile: ServingProfile) -> ServingProfile:
    """All runs arrive at once, so their steps do not depend on time: the constants are fitted to whole runs."""
    runs = []
    for name, measured in gpu_runs().items():
        if name in HELD_OUT:
            continue
        replica, workload = replica_of(name)
        arrivals, recorder = arrivals_of(FILE["workloads"][workload]), Recorder()
        simulate(arrivals, replica.scheduler(), recorder)

        def cost_of(tried: ServingProfile, replica: Replica = replica) -> StepCostModel:
            form = FORMATS[replica.weights]
            work = step_work(replica.spec, form)
            return StepCostModel(work, replica.device, tried, weights=form.weights, compute=form.compute)

        seconds = measured["steps"] * measured["ms_per_step"] / 1e3
        taken_s = sum(cost_of(profile).arrival_s(one.prompt_tokens) for one in arrivals)
        runs.append(Measured(name, cost_of, recorder.loads, seconds, taken_s))
    fitted = fit(profile, GPU_CONSTANTS, runs)
    for name in GPU_CONSTANTS:
        print(f"  {name:20s} {get(profile, name):12.6g} -> {get(fitted, name):12.6g}")
    for run in runs:
        print(f"  {run.name:28s} {100 * (run.predicted_s(fitted) / run.seconds - 1):+.1f}%")
    return fitted


# -- how fast ----------------------------------------------------------------------------------------------------
def measure_speed(repeats: int = 3) -> list[Row]:
    """Virtual seconds for each CPU second of the simulating thread: 20 requests/s on an 8B model."""
    rows = []
    cluster = catalog.cluster(1, "h200")
    for prompt, output, must in ((512, 64, 200.0), (512, 128, 200.0), (1024, 256, None)):
        rng, now_s, times_s = random.Random(0), 0.0, []
        for _ in range(600):
            times_s.append(now_s := now_s + rng.expovariate(20.0))
        lengths: tuple[Callable[[random.Random], int], ...] = (lambda _: prompt, lambda _: output)  # noqa: B023
        traffic = drawn_traffic(600, *lengths, times_s=times_s)
        replica = Replica(catalog.model("llama-3.1-8b"), cluster.node, cluster.fabric).with_context_for(
            traffic.arrivals
        )
        ratios = []
        for _ in range(repeats):
            began_s = time.thread_time()
            result = play(replica, traffic)
            ratios.append(result.simulated_s / (time.thread_time() - began_s))
        name = f"8B at 20 requests/s, {prompt} + {output} tokens"
        rows.append(Row(name, statistics.median(ratios), "× real time", "higher", must=must))
    return rows


# -- the real engine, here ---------------------------------------------------------------------------------------
def trace(
    count: int, rate: float, prompt: tuple[int, int], output: tuple[int, int], seed: int
) -> tuple[Arrival, ...]:
    rng, now_s, times_s = random.Random(f"{seed}/times"), 0.0, []
    for _ in range(count):
        times_s.append(now_s)
        now_s += rng.expovariate(rate)
    traffic = drawn_traffic(
        count, lambda r: r.randint(*prompt), lambda r: r.randint(*output), times_s=times_s, seed=seed
    )
    return traffic.arrivals


def device_here(device: str) -> tuple[Device, ServingProfile]:
    """What the ratios refer to, and where the fit starts."""
    if device == "cuda":
        return catalog.device("h200"), shipped_profiles()["h200"]
    sheet = Device(
        "this machine",
        "cpu",
        0,
        {"float32": 7.4e10},
        1 << 36,
        3.88e10,
        "memory",
        1e10,
        1e10,
        2,
        0.0,
        0.0,
        "measured",
    )
    host = Host(1e-4, 2e-6, 1e-4, 2e-6, 5e-5, 1e-7)
    reached = Reached(0.5, 0.8, 3.0)
    profile = ServingProfile(
        "this machine", "", 0.1, {"q4_1": reached, "float32": reached, "bfloat16": reached}, reached, 0.3, 1.0, 0.3,
        0.5, 100.0, 3e-5, 1e-6, 0.0, 3e-4, False, host,
    )  # fmt: skip
    return sheet, profile


def calibrate(
    seen: Seen, spec: ModelSpec, form: Format, sheet: Device, start: ServingProfile
) -> ServingProfile:
    """Constants from the steps of one trace; the host's from what planning and taking in took."""

    def cost_of(tried: ServingProfile) -> StepCostModel:
        return StepCostModel(step_work(spec, form), sheet, tried, weights=form.weights, compute=form.compute)

    rows = [load.rows for load in seen.loads]
    host = replace(
        start.host,
        submit_s=statistics.median(seen.submit_s), submit_row_s=0.0,
        apply_s=statistics.median(seen.apply_s), apply_row_s=0.0,
        arrival_s=statistics.median(seen.arrival_s), arrival_token_s=0.0,
    )  # fmt: skip
    start = replace(start, host=host)
    # Steps alike are one measurement, their median: a neighbour's burst on the machine is not the device's speed.
    alike: dict[tuple[int, int, int], list[int]] = {}
    for index, load in enumerate(seen.loads):
        key = (load.rows, load.tokens // 32 if load.tokens > load.rows else 0, load.decode_context // 512)
        alike.setdefault(key, []).append(index)
    runs = []
    for members in alike.values():
        times_s = sorted(seen.step_s[index] for index in members)
        middle = min(members, key=lambda index: abs(seen.step_s[index] - times_s[len(times_s) // 2]))
        runs.append(
            Measured(
                "", cost_of, [seen.loads[middle]], seen.step_s[middle], weight=float(len(members)) ** 0.5
            )
        )
    names = [f"{form.weights}.{name}" if name in ("bandwidth", "matmul") else name for name in HERE_CONSTANTS]
    fitted = fit(start, names, runs, hold=0.1)
    off = [abs(run.predicted_s(fitted) / run.seconds - 1) for run in runs]
    median = 100 * statistics.median(off)
    print(
        f"calibrated on {len(rows)} steps of up to {max(rows)} sequences; median step off by {median:.1f}%",
        flush=True,
    )
    for name in names:
        print(f"  {name:20s} {get(fitted, name):.6g}")
    return fitted


def compare_here(device: str, model: str, repeats: int) -> list[Row]:
    engine, spec, form = start_here(device, model)
    sheet, start = device_here(device)
    config = engine.scheduler.config
    if device == "cpu":
        first = trace(24, 2.0, (16, 256), (8, 64), seed=1)
        count, prompts, outputs = 24, (32, 200), (16, 48)
    else:
        first = trace(400, 20.0, (64, 1024), (32, 256), seed=1)
        count, prompts, outputs = 400, (128, 800), (64, 200)
    for repeat in range(2 if device == "cuda" else 1):  # compiles, captures and fills caches
        serve_really(engine, first if device == "cuda" else first[: len(first) // 4], repeat)
    seen = serve_really(engine, first, 1)
    profile = calibrate(seen, spec, form, sheet, start)
    # As busy a server as one would run: six tenths of what kept it busy all the time.
    rate = 0.6 * len(first) / sum(seen.step_s)
    second = trace(count, rate, prompts, outputs, seed=2)
    if device == "cuda":
        for repeat in range(2):  # captures its shapes, too
            serve_really(engine, second, 20 + repeat)
    real = [serve_really(engine, second, 3 + repeat) for repeat in range(repeats)]
    cost = StepCostModel(step_work(spec, form), sheet, profile, weights=form.weights, compute=form.compute)
    run = simulate(second, Scheduler(config), cost)
    simulated = report(run, config.blocks, cost.spent(run))
    rows = []

    def compare(
        name: str, predicted: float, measured: Sequence[float], must: float, unit: str, scale: float
    ) -> None:
        middle = statistics.median(measured)
        note = f"{predicted * scale:.4g} {unit} against {middle * scale:.4g}"
        rows.append(
            Row(f"{name}, off by", 100 * abs(predicted / middle - 1), "%", "lower", must=must, note=note)
        )

    compare(
        "throughput", simulated.output_tok_s, [one.tokens / one.seconds for one in real], 7.0, "tok/s", 1.0
    )
    for name, spread, values in (
        ("time to first token", simulated.ttft_s, [one.ttft_s for one in real]),
        ("time between tokens", simulated.itl_s, [one.gaps_s for one in real]),
    ):
        spreads = [found for found in map(Percentiles.of, values) if found is not None]
        assert spread is not None and spreads
        compare(f"{name} p50", spread.p50, [one.p50 for one in spreads], 10.0, "ms", 1e3)
        compare(f"{name} p99", spread.p99, [one.p99 for one in spreads], 20.0, "ms", 1e3)
    engine.runner.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--model", default="", help="cpu: as for cumulo serve; cuda: a model of workloads.json"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.fit:
        print(
            yaml.safe_dump(
                {"h200": asdict(fit_host(fit_gpu(fit_host(shipped_profiles()["h200"]))))}, sort_keys=False
            )
        )
        return
    rows = (
        compare_here(chosen.device, chosen.model, chosen.repeats)
        if chosen.here
        else compare_with_gpu() + measure_speed()
    )
    for row in rows:
        print(
            f"{'  ' if row.ok else 'NO'} {row.name:48s} {row.value:8.1f} {row.unit:12s} must {row.must}  {row.note}"
        )
    write_json(chosen.json, rows)


if __name__ == "__main__":
    main()
