"""Ways to play the parts of a round (RoundWays), in turns, for one request: what each brings, and whether answers
stay the same. A model and its trained head on a GPU.

    python benchmarks/gpu_round_ways.py MODEL HEAD [--prompts 12] [--kernels]
"""

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_rounds import _print_kernels  # noqa: E402
from cumulo.bench.speculate import chat_prompts  # noqa: E402
from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.decide.speculation.rounds import RoundPolicy  # noqa: E402
from cumulo.engine.llm import LLM  # noqa: E402
from cumulo.engine.play.cuda.step_words import StepShape  # noqa: E402
from cumulo.kernels.cuda.captured import CapturedGraphs  # noqa: E402
from cumulo.kernels.cuda.linear.draft_linear import likeliest, likeliest_parts  # noqa: E402
from cumulo.kernels.cuda.linear.likeliest_linear import TileConfig, likeliest_tiles, tile_parts  # noqa: E402
from cumulo.kernels.cuda.linear.linear import linear  # noqa: E402
from cumulo.kernels.cuda.timing import copies_past_cache, graph_us  # noqa: E402
from cumulo.models.play.cuda_eagle import RoundWays  # noqa: E402

TILES = [TileConfig(*pair) for pair in ((16, 2), (32, 4), (64, 4), (64, 8), (128, 8))]
PARAMS = SamplingParams(temperature=0, max_tokens=192)


@dataclass
class Way:
    """One way to play rounds, with graphs of its own."""

    name: str
    ways: RoundWays
    taps_in_place: bool
    same_arithmetic: bool  # as the first: answers must be equal
    graphs: CapturedGraphs[StepShape] = field(default_factory=CapturedGraphs)
    seen: set[StepShape] = field(default_factory=set)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--kernels", action="store_true", help="also where the time of a round goes")
    chosen = parser.parse_args()
    draw_tile, draft_tile = best_tiles()
    config = EngineConfig(
        max_context=2048, kv_memory_gib=1, prefix_cache=False, speculate=chosen.head, draft_tree=3
    )
    with LLM(chosen.model, config=config, speculate=chosen.head) as llm:
        before = RoundWays(False, False, False, False, draw_tile, draft_tile)
        fewer = replace(before, rotates_in_product=True, enters_at_once=True)
        both = replace(fewer, draws_without_logits=True, proposes_in_tiles=True)
        ways = [
            Way("before", before, False, True),
            Way("rotates", replace(before, rotates_in_product=True), False, True),
            Way("enters", replace(before, enters_at_once=True), False, True),
            Way("taps", before, True, True),
            Way("fewer launches", fewer, True, True),
            Way("... no logits", replace(fewer, draws_without_logits=True), True, False),
            Way("... tiles", replace(fewer, proposes_in_tiles=True), True, True),
            Way("... both", both, True, False),
        ]
        compare(llm, ways, chosen.prompts)
        if chosen.kernels:
            for way, drafts in ((ways[0], 0), (ways[-1], 3)):
                use(llm, way, (drafts, 0))
                print(f"kernels, {way.name}, {drafts} drafts")
                _print_kernels(lambda: answer(llm, chat_prompts(2)[1]))


def best_tiles() -> tuple[TileConfig, TileConfig]:
    """Of the greedy draws of four rows, and of a proposal; shapes of SmolLM2-135M. Weights of draws come from
    memory, those of proposals from the cache, as in a round."""
    return best_tile("draws", 4, 49_152, False), best_tile("proposals", 1, 12_288, True)


def best_tile(name: str, rows: int, outputs: int, cached: bool) -> TileConfig:
    copies = 1 if cached else copies_past_cache(2 * 576 * outputs)
    weights = [torch.randn(outputs, 576, device="cuda").bfloat16() for _ in range(copies)]
    x, norm = torch.randn(rows, 576, device="cuda").bfloat16(), torch.ones(576, device="cuda").bfloat16()
    best = torch.empty(rows, likeliest_parts(outputs), device="cuda")
    places = torch.empty(rows, likeliest_parts(outputs), device="cuda", dtype=torch.int32)
    exact = (torch.nn.functional.rms_norm(x, (576,), norm, 1e-5) @ weights[0].t()).float()
    times: dict[TileConfig, float] = {}

    def launch(index: int, tile: TileConfig) -> tuple[Tensor, Tensor]:
        parts = tile_parts(outputs, tile)
        peaks, owners = (one.view(-1)[: rows * parts].view(rows, parts) for one in (best, places))
        likeliest_tiles(x, weights[index], norm, 1e-5, peaks, owners, config=tile)
        return peaks, owners

    for tile in TILES:
        peaks, owners = launch(0, tile)
        token = owners.gather(1, peaks.argmax(dim=1, keepdim=True)).long()
        lost = (exact.amax(1) - exact.gather(1, token)[:, 0]).max().item()  # roundings of near equals
        assert lost < 0.05 * exact.amax().item(), f"{tile} chose a logit that is {lost} lower"
        times[tile] = graph_us(partial(launch, tile=tile), copies)
    plain = graph_us(lambda i: likeliest(x, weights[i], norm, 1e-5, best, places), copies)
    out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    logits = graph_us(lambda i: linear(x, weights[i], out=out), copies)
    print(
        f"{name}, {rows} rows of {outputs}: "
        + ", ".join(f"{tile.rows}/{tile.num_warps} {us:.2f}" for tile, us in times.items())
        + f" us in tiles; {plain:.2f} as likeliest, {logits:.2f} for logits without norm",
        flush=True,
    )
    return min(times, key=lambda tile: times[tile])


def use(llm: LLM, way: Way, kind: tuple[int, int]) -> None:
    runner, policy = llm.engine.runner, llm.engine.scheduler.speculation
    assert isinstance(policy, RoundPolicy)
    torch.cuda.synchronize()
    runner.head.head.ways, runner.model.taps_in_place = way.ways, way.taps_in_place
    runner.launches.graphs, runner.launches.seen = way.graphs, way.seen
    policy.fixed_count, policy.fixed_levels = kind
    policy._learnt(1).hopeless = not kind[0]  # a run without drafts has no head to feed


def answer(llm: LLM, text: str) -> tuple[list[int], float]:
    """Tokens, and seconds behind the first."""
    output = llm.chat([[{"role": "user", "content": text}]], PARAMS)[0]
    now_s = time.perf_counter()
    return output.samples[0].token_ids, now_s - (output.story.first_token_s or now_s)


def compare(llm: LLM, ways: list[Way], prompts: int) -> None:
    """Every prompt is answered in all ways in turn; the first two compile and capture and do not count."""
    before, last = ways[0], ways[-1]
    turns = [(before, (0, 0)), (last, (0, 0)), *((way, (3, 0)) for way in ways)]
    turns += [(way, kind) for kind in ((2, 0), (4, 0), (5, 0), (7, 3)) for way in (before, ways[4], last)]
    policy: Any = llm.engine.scheduler.speculation
    learn, hits = policy.learn, list[int]()

    def noting(plan: Any, draws: Any, result: Any) -> None:
        hits.extend(one for row in result.round_hits.values() for one in row)
        learn(plan, draws, result)

    policy.learn = noting
    seconds, tokens, kept = (
        defaultdict[int, float](float),
        defaultdict[int, int](int),
        defaultdict[int, list[int]](list),
    )
    answers = defaultdict[int, list[list[int]]](list)
    texts = chat_prompts(prompts)
    began_s = time.perf_counter()
    for number, text in enumerate([texts[0], texts[0], *texts]):
        for turn, (way, kind) in enumerate(turns):
            use(llm, way, kind)
            hits.clear()
            found, took_s = answer(llm, text)
            if number > 1:
                seconds[turn] += took_s
                tokens[turn] += len(found) - 1
                kept[turn] += hits
                answers[turn].append(found)
    print(f"{time.perf_counter() - began_s:.0f} s for {len(turns)} ways and {prompts + 2} prompts")
    plain = seconds[0] / tokens[0]
    for turn, (way, kind) in enumerate(turns):
        rounds = len(kept[turn]) or tokens[turn]
        first = next(index for index, (_, other) in enumerate(turns) if other == kind)
        equal = sum(one == other for one, other in zip(answers[turn], answers[first], strict=True))
        wrong = way.same_arithmetic and equal < prompts and kind[0] > 0
        print(
            f"{kind[0]} drafts, {kind[1]} levels, {way.name:15}: {1e3 * seconds[turn] / rounds:.4f} ms a round, "
            f"{1 + sum(kept[turn]) / rounds:.2f} tokens, {plain * tokens[turn] / seconds[turn]:.3f}x; "
            f"{equal} of {prompts} answers equal{' WRONG: all must be' if wrong else ''}",
            flush=True,
        )
    policy.learn = learn


if __name__ == "__main__":
    main()
