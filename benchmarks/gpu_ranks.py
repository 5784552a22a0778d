"""Ranks on one GPU: processes of their own, each with its part of the model, that read each other's memory. Do they
say what one rank says, and where does a step's time go?

    nvidia-cuda-mps-control -d        # lets kernels of two processes run side by side
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/gpu_ranks.py --json results/gpu_ranks.json
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/gpu_ranks.py --answers --model MODEL.gguf --tp 3
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/gpu_ranks.py --answers --model MODEL.gguf --pp 2

Models are shapes in random weights. Two ranks share one GPU here, so nothing gets faster: correctness and the cost
of the sums are what this shows.
"""

import argparse
import gc
import itertools
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import FILE, random_decoder  # noqa: E402
from benchmarks.gpu_rank_answers import agreement, compare_answers  # noqa: E402
from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.decide.scheduler import Scheduler  # noqa: E402
from cumulo.engine.decide.scheduler_config import SchedulerConfig  # noqa: E402
from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.engine.play.rank_play import SharedGuides  # noqa: E402
from cumulo.engine.play.rank_player_cuda import make_cuda_runner  # noqa: E402
from cumulo.engine.play.runner_cuda import CudaRunner  # noqa: E402
from cumulo.kernels.cuda.collective.one_shot import sum_partials  # noqa: E402
from cumulo.layout.serving import RankPart, ServingLayout, held_parameters, rank_part  # noqa: E402
from cumulo.models.batch import KVCache  # noqa: E402
from cumulo.models.decoder import Decoder  # noqa: E402
from cumulo.models.play.cuda_decoder import CudaDecoder  # noqa: E402
from cumulo.models.play.rank_decoder import empty_rank_decoder  # noqa: E402
from cumulo.models.play.rank_links import RankLinks, connect  # noqa: E402
from cumulo.ranks.rank_group import TCPStore, meeting_point  # noqa: E402
from cumulo.ranks.start import run_ranks  # noqa: E402
from cumulo.spec.from_huggingface import spec_from_config  # noqa: E402
from cumulo.spec.model import ModelSpec  # noqa: E402

MODELS = {"qwen3-0.6b": None, "llama-3.1-8b": 4, "qwen3-30b-a3b": 4}  # layers; None: all
SLOTS, CONTEXT = 64, 1024
DEVICE = torch.device("cuda")


def model_spec(name: str) -> ModelSpec:
    spec, layers = spec_from_config(FILE["models"][name]), MODELS[name]
    return spec if layers is None else replace(spec, layers=layers)


def slice_of(spec: ModelSpec, part: RankPart) -> Decoder:
    """A rank's decoder of the model that `random_decoder` makes."""
    whole = random_decoder(spec)
    if part.layout.world == 1:
        return whole
    decoder = empty_rank_decoder(part, torch.bfloat16, DEVICE)
    for name, held in held_parameters(part).items():
        given = whole.get_parameter(held.source)
        for box in held.boxes:
            decoder.get_parameter(name).data[box.held_slices] = given[box.whole_slices]
    del whole
    gc.collect()
    torch.cuda.empty_cache()
    return decoder


def engine_of(
    spec: ModelSpec, rank: int, layout: ServingLayout, invariant: bool, step: int, weights: str = "auto"
) -> Engine:
    """Every rank has one: all draw the same tokens, so all plan alike. `step`: its most tokens."""
    part = rank_part(spec, layout, rank)
    decoder = slice_of(spec, part)
    decoder.rotary.serve(CONTEXT)
    blocks = SLOTS * CONTEXT // 64
    if layout.world == 1:
        model = CudaDecoder(decoder, step, SLOTS, weights=weights, batch_invariant=invariant)
        cache = KVCache(decoder.spec, blocks, 64, torch.bfloat16, DEVICE)
        runner = CudaRunner(model, cache, max_slots=SLOTS, max_context=CONTEXT)
    else:
        store, links = _meet(part)
        config = EngineConfig(
            device="cuda", dtype="bfloat16", block_size=64, max_running=SLOTS, max_tokens_per_step=step,
            batch_invariant=invariant, cuda_graphs=True, tp=layout.tp, dp=layout.dp, ep=layout.ep, weights=weights,
        )  # fmt: skip
        memory: Any = SimpleNamespace(kv_blocks=blocks * layout.dp, max_context=CONTEXT, all_host_blocks=0)
        runner = make_cuda_runner(
            config, memory, part, decoder, store, (), SharedGuides(None, links), links, DEVICE
        )
    scheduler = SchedulerConfig(
        blocks=blocks * layout.dp, block_size=64, max_context=CONTEXT, max_running=SLOTS,
        max_tokens_per_step=step, homes=layout.dp,
    )  # fmt: skip
    return Engine(Scheduler(scheduler), runner, None, vocab_size=spec.vocab_size)


def _meet(part: RankPart) -> tuple[TCPStore, RankLinks]:
    world = _get_default_store()
    if part.rank == 0:
        store = meeting_point()
        world.set("port", str(store.port))
    else:
        store = meeting_point(int(world.get("port")))
    return store, connect(part, store, 120.0)


def answers(engine: Engine, prompts: list[list[int]], tokens: int, **params: Any) -> list[Any]:
    ids = [
        engine.add(p, SamplingParams(max_tokens=tokens, ignore_eos=True, seed=7, **params)).id
        for p in prompts
    ]
    done = {}
    while engine.has_work:
        for output in engine.step().finished:
            assert output.error is None, output.error
            done[output.request_id] = output.samples[0]
    return [done[one] for one in ids]


def step_ms(engine: Engine, rows: int, vocabulary: int) -> float:
    """Median time between the ends of decoding steps, of so many sequences."""
    for index in range(rows):
        engine.add([index % vocabulary] * 128, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    ends = []
    while engine.has_work:
        engine.step()
        ends.append(time.perf_counter())
    gaps = sorted(b - a for a, b in itertools.pairwise(ends[8:]))
    return 1e3 * gaps[len(gaps) // 2]


def prompts_of(vocabulary: int, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randint(0, vocabulary, (24 + 7 * (i % 9),), generator=generator).tolist() for i in range(count)
    ]


@dataclass(frozen=True)
class Case:
    """What every rank plays. `brief`: greedy answers and bits only; `times`: of steps, too."""

    model: str
    layout: ServingLayout
    invariant: bool
    prompts: int
    tokens: int
    step: int
    brief: bool
    weights: str = "auto"
    times: bool = False


def play(rank: int, case: Case) -> dict[str, Any]:
    torch.cuda.set_device(0)
    spec, began_s, alone = model_spec(case.model), time.perf_counter(), case.layout.world == 1

    def told(what: str) -> None:  # where a run that hangs had come to
        if rank == 0:
            print(f"  {case.model}, {case.layout}: {what} after {time.perf_counter() - began_s:.1f} s",
                  file=sys.stderr, flush=True)  # fmt: skip

    engine = engine_of(spec, rank, case.layout, case.invariant, case.step, case.weights)
    told("loaded")
    prompts = prompts_of(spec.vocab_size, case.prompts)

    def tokens_of(some: list[list[int]], **params: Any) -> list[list[int]]:
        return [one.token_ids for one in answers(engine, some, case.tokens, **params)]

    found: dict[str, Any] = {"greedy": tokens_of(prompts, temperature=0.0)}
    told("drawn")
    if not case.brief:
        found["sampled"] = tokens_of(prompts[:16], temperature=1.0)
        found["cut"] = tokens_of(prompts[:16], temperature=0.8, top_k=20, top_p=0.9)
        told("sampled")
    engine.scheduler.pool.clear_cache()
    if alone and not case.invariant:  # what other step-mates alone change: the measure of what ranks may
        eights = (prompts[first : first + 8] for first in range(0, len(prompts), 8))
        found["in eights"] = [one for some in eights for one in tokens_of(some, temperature=0.0)]
        engine.scheduler.pool.clear_cache()
    if case.invariant or not case.brief:
        found["bits"] = bits(engine, prompts[:16])
        told("bits")
    found["graphs"] = len(engine.runner.launches.graphs)  # type: ignore[attr-defined]
    if case.brief and not case.times:
        return found
    found["step_ms"] = {}
    for rows in (1, 16, 64):
        step_ms(engine, rows, spec.vocab_size)  # captures
        engine.scheduler.pool.clear_cache()
        found["step_ms"][rows] = step_ms(engine, rows, spec.vocab_size)
    told(f"timed {found['step_ms']}")
    if case.layout.tp > 1 and not case.brief:
        found["sum_us"] = {rows: sum_us(engine, rows) for rows in (1, 16, 64, 512, case.step)}
    return found


def bits(engine: Engine, prompts: list[list[int]]) -> list[list[list[float]]]:
    """Log-probabilities of four prompts: in a batch with the others, and each alone."""
    together = answers(engine, prompts, 24, temperature=0.0, logprobs=4)
    alone = []
    for prompt in prompts[:4]:
        engine.scheduler.pool.clear_cache()
        alone += answers(engine, [prompt], 24, temperature=0.0, logprobs=4)
    return [
        [[entry.logprob for entry in sample.logprobs] for sample in some] for some in (together[:4], alone)
    ]


def sum_us(engine: Engine, rows: int) -> float:
    """Of one sum over the ranks, in a graph of 40."""
    model = engine.runner.model  # type: ignore[attr-defined]
    stream = model.stream[:rows]
    partials, memory = model.slice._partials, model.slice.memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(40):
            sum_partials(memory, partials[turn % 2], model.slice._dtype_of(rows), stream, add=False)
    graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / 200


def compared(case: Case, one: dict[str, Any], several: list[dict[str, Any]]) -> dict[str, Any]:
    first = several[0]
    share, diverged = agreement(first["greedy"], one["greedy"])
    row: dict[str, Any] = {
        "model": f"{case.model} ({MODELS[case.model] or 'all'} layers)", "ranks": str(case.layout),
        "batch_invariant": case.invariant, "weights": case.weights, "tokens a step": case.step,
        "prompts": case.prompts,
        "greedy agreement %": round(share, 2), "answers that diverge": diverged,
        "whole answers alike %": round(100 - 100 * diverged / case.prompts, 2),
        "ranks agree": all(other.get(k) == first.get(k) for other in several for k in ("greedy", "sampled", "cut")),
        "graphs": first["graphs"],
    }  # fmt: skip
    if "in eights" in one:
        row["one rank, in other batches %"] = round(agreement(one["in eights"], one["greedy"])[0], 2)
    if "bits" in one:
        row["bits alone = in a batch"] = first["bits"][0] == first["bits"][1]
        row["one rank's"] = one["bits"][0] == one["bits"][1]
        row["bits of one rank"] = first["bits"] == one["bits"]
    if not case.brief:
        row["sampled %"] = round(agreement(first["sampled"], one["sampled"])[0], 2)
        row["top-k, top-p %"] = round(agreement(first["cut"], one["cut"])[0], 2)
        row["sum_us"] = first.get("sum_us")
    if "step_ms" in one:
        row |= {"step_ms one rank": one["step_ms"], "step_ms two": first["step_ms"]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--step", type=int, default=2048, help="tokens; up to 512 ranks add up in float32")
    parser.add_argument("--answers", action="store_true", help="answers of a real model, by LLM(tp=...)")
    parser.add_argument("--model", help="its file; none: the built-in model")
    for name in ("tp", "pp", "dp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1, help="ranks; none of shapes: tp 2, and ep 2")
    parser.add_argument("--kinds", default="plain,invariant")
    parser.add_argument("--weights", default="auto", choices=("auto", "fp8", "int4"), help="of shapes")
    parser.add_argument("--brief", action="store_true", help="of shapes: no draws, no times")
    parser.add_argument("--times", action="store_true", help="times of steps, also with --brief")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds that ranks of a shape may take")
    parser.add_argument("--kill", action="store_true", help="and kill a rank in mid-answer")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    if chosen.answers:
        layout = ServingLayout(chosen.tp, chosen.pp, chosen.dp, chosen.ep)
        kinds = tuple(kind == "invariant" for kind in chosen.kinds.split(","))
        found = compare_answers(chosen.model, layout, kinds, chosen.questions, chosen.device, chosen.kill)
        for name, row in found.items():
            print(f"{name}: {row}", flush=True)
        if chosen.json:
            Path(chosen.json).write_text(json.dumps(found, indent=1))
        return
    rows = []
    for name in chosen.models.split(","):
        for invariant in (kind == "invariant" for kind in chosen.kinds.split(",")):
            layout = ServingLayout(chosen.tp, dp=chosen.dp, ep=chosen.ep)
            if layout.world == 1:
                layout = ServingLayout(tp=2, ep=1 if model_spec(name).moe is None else 2)
            sizes = (chosen.prompts, chosen.tokens, chosen.step)
            case = Case(name, layout, invariant, *sizes, chosen.brief, chosen.weights, chosen.times)
            (one,) = run_ranks(play, 1, replace(case, layout=ServingLayout()), timeout_s=chosen.limit)
            several = run_ranks(play, layout.world, case, timeout_s=chosen.limit)
            rows.append(compared(case, one, several))
            print(json.dumps(rows[-1]), flush=True)
    if chosen.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
