"""What a draft head brings on a GPU: a step's cost with 1 to 8 drafts, and the length that the engine predicts to
be best against the best one measured. Weights are random, shapes are real; how many drafts are kept in each round
is replayed from a recorded run of a real model with a trained head, or drawn with the rates at which it was right.

    python benchmarks/gpu_rounds.py --record MODEL --head FOLDER --trace results/kept_drafts.json   # a real model
    python benchmarks/gpu_rounds.py --model llama-3.1-8b --trace results/kept_drafts.json           # another shape
    python benchmarks/gpu_rounds.py --chat MODEL --head FOLDER          # chains and trees of a real head, timed
    python benchmarks/gpu_rounds.py --model smollm2-135m --rates 0.62,0.66,0.69 --drafts 0,1,3,7 --kernels
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import FILE, random_decoder  # noqa: E402
from cumulo.bench.speculate import chat_prompts  # noqa: E402
from cumulo.engine.assembly import free_memory, start_engine  # noqa: E402
from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.decide.speculation.rounds import RoundPolicy  # noqa: E402
from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.engine.llm import LLM  # noqa: E402
from cumulo.engine.memory.memory_plan import plan_memory  # noqa: E402
from cumulo.engine.play.cuda import rounds as cuda_rounds  # noqa: E402
from cumulo.engine.play.draft_source import DraftSource, attach_rounds  # noqa: E402
from cumulo.models.heads.eagle import EagleHead  # noqa: E402
from cumulo.spec.from_huggingface import spec_from_config  # noqa: E402
from cumulo.spec.model import ModelSpec  # noqa: E402

TOKENS = 256
MOST_DRAFTS = 8
DRAFT_VOCABULARY = {"smollm2-135m": 12_288}  # others: 32,000
REPLAYED = 4096  # rounds that are drawn where rates are given


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", help="a model whose head's kept drafts become the trace")
    parser.add_argument("--chat", help="a model that answers chat prompts with chains and trees of its head")
    parser.add_argument(
        "--kinds", default=KINDS, help="of --chat: numbers of drafts, trees as drafts/levels, or `chosen`"
    )
    parser.add_argument("--head", help="the folder of that head")
    parser.add_argument("--model", help="whose shape is measured, by its name in workloads.json")
    parser.add_argument("--trace", type=Path, help="a file of kept drafts, written or replayed")
    parser.add_argument(
        "--rates", help="instead of a trace: how often each place is right, those before it being"
    )
    parser.add_argument(
        "--drafts", default=",".join(map(str, range(MOST_DRAFTS + 1))), help="numbers to measure"
    )
    parser.add_argument("--kernels", action="store_true", help="also where the time of a round goes")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.record:
        kept = record(chosen.record, chosen.head)
        chosen.trace.write_text(json.dumps({"drafts": MOST_DRAFTS, "kept": kept}) + "\n")
        print(f"{len(kept)} rounds, {statistics.fmean(kept):.2f} of {MOST_DRAFTS} drafts kept on average")
    if chosen.chat:
        answer_chats(chosen.chat, chosen.head, chosen.kinds, chosen.kernels)
    if chosen.model:
        if chosen.rates:
            kept = drawn([float(rate) for rate in chosen.rates.split(",")])
        else:
            kept = json.loads(chosen.trace.read_text())["kept"]
        drafts = [int(count) for count in chosen.drafts.split(",")]
        measured = measure(chosen.model, kept, drafts, chosen.kernels)
        if chosen.json:
            chosen.json.write_text(json.dumps(measured, indent=1) + "\n")


def drawn(rates: list[float]) -> list[int]:
    """Kept drafts of rounds whose places are right at these rates; further ones as the last."""
    rng = random.Random(0)
    kept = []
    for _ in range(REPLAYED):
        count = 0
        while count < MOST_DRAFTS and rng.random() < rates[min(count, len(rates) - 1)]:
            count += 1
        kept.append(count)
    return kept


def record(model: str, head: str) -> list[int]:
    config = EngineConfig(max_context=2048, kv_memory_gib=1, prefix_cache=False)
    kept: list[int] = []
    with LLM(model, config=config, speculate=head) as llm:
        policy = llm.engine.scheduler.speculation
        assert isinstance(policy, RoundPolicy)
        policy.fixed_count = MOST_DRAFTS
        learn = policy.learn

        def noting(plan: Any, draws: Any, result: Any) -> None:
            kept.extend(hits for row in result.round_hits.values() for hits in row)
            learn(plan, draws, result)

        policy.learn = noting  # type: ignore[method-assign]
        for text in chat_prompts(24):
            llm.chat([[{"role": "user", "content": text}]], SamplingParams(temperature=0, max_tokens=128))
    return kept


KINDS = "0,1,2,3,4,5,7,7/2,7/3,7/4,chosen"
CHOSEN = (-1, 0)


def _kind(text: str) -> tuple[int, int]:
    """Drafts and levels."""
    drafts, _, levels = text.partition("/")
    return CHOSEN if text == "chosen" else (int(drafts), int(levels or 0))


def answer_chats(model: str, head: str, kinds_text: str, kernels: bool, prompts: int = 12) -> None:
    """Tokens per second of single answers, by drafts and levels of a tree, and where the time goes: until the first
    token, in rounds on the device, between two steps on the host, in rounds behind an answer's end. Every prompt
    is answered by all kinds in turn; the first answers compile and capture and do not count."""
    kinds = [_kind(text) for text in kinds_text.split(",")]
    most = max(levels for _, levels in kinds)
    config = EngineConfig(
        max_context=2048, kv_memory_gib=1, prefix_cache=False, speculate=head, draft_tree=most
    )
    with LLM(model, config=config, speculate=head) as llm:
        policy = llm.engine.scheduler.speculation
        assert isinstance(policy, RoundPolicy)
        hits: list[int] = []
        learn, submit, finish = policy.learn, llm.engine.runner.submit, llm.engine._finish
        spent: dict[str, float] = defaultdict(float)
        clock = {"back": 0.0}

        def noting(plan: Any, draws: Any, result: Any) -> None:
            hits.extend(one for row in result.round_hits.values() for one in row)
            learn(plan, draws, result)

        def submitting(plan: Any) -> Any:
            began_s = time.perf_counter()
            pending = submit(plan)
            if clock["back"]:
                spent["planning"] += began_s - clock["back"]
            spent["submitting"] += time.perf_counter() - began_s
            spent["steps"] += 1
            spent["rounds"] += plan.rounds.times if plan.rounds is not None else 0
            return pending

        def finishing(plan: Any, pending: Any, output: Any) -> None:
            result = pending.result()
            clock["back"] = time.perf_counter()
            if plan.rounds is not None or plan.tokens == len(plan.slots):
                spent["device"] += result.finished_s - result.started_s
            else:
                spent["prompt"] += result.finished_s - result.started_s
            finish(plan, pending, output)
            spent["finishing"] += time.perf_counter() - clock["back"]

        policy.learn = noting  # type: ignore[method-assign]
        llm.engine.runner.submit = submitting  # type: ignore[method-assign]
        llm.engine._finish = finishing  # type: ignore[method-assign]
        params = SamplingParams(temperature=0, max_tokens=192)
        seconds: dict[tuple[int, int], float] = defaultdict(float)
        firsts: dict[tuple[int, int], float] = defaultdict(float)
        tokens: dict[tuple[int, int], int] = defaultdict(int)
        kept: dict[tuple[int, int], list[int]] = defaultdict(list)
        parts: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        texts = chat_prompts(prompts)
        for number, text in enumerate([texts[0], texts[0], *texts]):
            for kind in kinds:
                policy.fixed_count, policy.fixed_levels = (None, 0) if kind == CHOSEN else kind
                policy._learnt(1).hopeless = not kind[0]  # a run without drafts has no head to feed
                hits.clear()
                spent.clear()
                clock["back"] = 0.0
                began_s = time.perf_counter()
                output = llm.chat([[{"role": "user", "content": text}]], params)[0]
                if number > 1:
                    seconds[kind] += time.perf_counter() - began_s
                    firsts[kind] += (output.story.first_token_s or began_s) - began_s
                    tokens[kind] += len(output.samples[0].token_ids)
                    kept[kind] += hits
                    for name, value in spent.items():
                        parts[kind][name] += value
        plain = tokens[0, 0] / seconds[0, 0]
        for kind in kinds:
            rate, own = tokens[kind] / seconds[kind], parts[kind]
            more = 1 + statistics.fmean(kept[kind]) if kept[kind] else 1.0
            rounds = own["rounds"] or own["steps"]
            each = 1e3 / rounds
            name = "chosen" if kind == CHOSEN else f"{kind[0]} drafts, {kind[1]} levels"
            print(
                f"{name}: {rate:6.0f} tok/s, {rate / plain:.2f}x, {more:.2f} tokens a "
                f"round; ms of each of {rounds:.0f} rounds: {seconds[kind] * each:.3f} in all, device "
                f"{own['device'] * each:.3f}, prompt {own['prompt'] * each:.3f}, finishing "
                f"{own['finishing'] * each:.3f}, planning {own['planning'] * each:.3f}, submitting "
                f"{own['submitting'] * each:.3f} ({own['steps']:.0f} steps), first token after "
                f"{1e3 * firsts[kind] / prompts:.2f} ms, {rounds * more - tokens[kind]:.0f} of {tokens[kind]} "
                "tokens too many",
                flush=True,
            )  # fmt: skip
        if kernels:
            for kind in ((0, 0), (3, 0), (7, 3 if most >= 3 else 0)):
                policy.fixed_count, policy.fixed_levels = kind
                policy._learnt(1).hopeless = not kind[0]
                print(f"kernels, {kind[0]} drafts, {kind[1]} levels")
                _print_kernels(lambda: llm.chat([[{"role": "user", "content": texts[1]}]], params))


def measure(name: str, kept: list[int], counts: list[int], kernels: bool) -> dict[str, Any]:
    spec = spec_from_config(FILE["models"][name])
    engine = _engine(name, spec, kept)
    policy = engine.scheduler.speculation
    assert isinstance(policy, RoundPolicy)
    rates: dict[int, float] = {}
    for drafts in counts:
        policy.fixed_count = drafts
        policy._learnt(1).hopeless = not drafts  # a run without drafts has no head to feed
        _decode(engine)
        rates[drafts] = statistics.median(_decode(engine) for _ in range(3))
        yielded = 1 + statistics.fmean(min(count, drafts) for count in kept)
        print(
            f"{name}, {drafts} drafts: {rates[drafts]:7.0f} tok/s, {rates[drafts] / rates[counts[0]]:.2f}x, "
            f"{1e3 * yielded / rates[drafts]:.3f} ms for {yielded:.2f} tokens",
            flush=True,
        )
        if kernels:
            _print_kernels(lambda: _decode(engine))
    policy.fixed_count = None
    chosen = statistics.median(_decode(engine) for _ in range(3))
    best = max(rates, key=lambda drafts: rates[drafts])
    predicted, gain = policy.best(1)
    print(f"{name}, as it chooses: {chosen:7.0f} tok/s, {chosen / rates[counts[0]]:.2f}x; predicted best "
          f"{predicted.drafts} drafts ({gain:.2f}x), measured best {best} "
          f"({rates[best] / rates[counts[0]]:.2f}x)")  # fmt: skip
    rounds = {drafts: seconds for (drafts, _), (seconds, _) in policy._learnt(1).rounds.items()}
    return {"model": name, "tokens_per_s": rates, "chosen": chosen, "predicted": predicted.drafts, "best": best,
            "round_s": rounds, "plain_s": policy._learnt(1).plain[0]}  # fmt: skip


def _print_kernels(decode: Callable[[], object]) -> None:
    """Kernels of one request's decoding by name and grid: how many a round, how long each runs, and how long it is
    from its beginning to the next one's, which includes the wait between them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        decode()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    launches = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda event: event["ts"])
    ends = ("_pick", "_accept_likeliest")  # of draws from logits, and of those without
    draws = [i for i, event in enumerate(launches) if any(end in event["name"] for end in ends)]
    launches = launches[draws[len(draws) // 4] : draws[3 * len(draws) // 4]]  # whole rounds, of the middle
    rounds = max(1, len(draws) // 2)
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for event, after in zip(launches, launches[1:] + launches[-1:], strict=True):
        row = found[event["name"][:60], str(event["args"].get("grid"))]
        row[0] += 1
        row[1] += event["dur"]
        row[2] += min(after["ts"] - event["ts"], 100.0)  # between two steps the host is waited for
    print(f"    of {rounds} rounds: {len(launches) / rounds:.0f} launches, "
          f"{sum(r[1] for r in found.values()) / rounds:.0f} us in kernels, "
          f"{sum(r[2] for r in found.values()) / rounds:.0f} us from start to start")  # fmt: skip
    for (name, grid), (count, ran, until) in sorted(found.items(), key=lambda item: -item[1][2])[:32]:
        print(f"    {until / rounds:7.1f} us  {count / rounds:6.1f} x {ran / count:5.2f} us "
              f"(start to start {until / count:5.2f})  {grid:16} {name}")  # fmt: skip


def _engine(name: str, spec: ModelSpec, kept: list[int]) -> Engine:
    # "rounds" is chosen by the name of a folder with a head; here the head is random.
    config = EngineConfig(
        max_context=2048, kv_memory_gib=4, max_running=16, prefix_cache=False, speculate="random head"
    ).settled("cuda")
    memory = plan_memory(spec, 0, config, free_memory(config))
    engine, player = start_engine(random_decoder(spec), config, memory)
    own = ModelSpec(
        family="llama", vocab_size=spec.vocab_size, hidden=spec.hidden, layers=1, heads=spec.heads,
        kv_heads=spec.kv_heads, head_dim=spec.head_dim, ffn_hidden=spec.ffn_hidden or 4 * spec.hidden,
        max_context=spec.max_context, norm_eps=spec.norm_eps, rope_theta=spec.rope_theta,
    )  # fmt: skip
    words = min(DRAFT_VOCABULARY.get(name, 32_000), spec.vocab_size)
    head = EagleHead(own, 3 * spec.hidden, words, dtype=torch.bfloat16)
    for parameter in head.parameters():
        parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    attach_rounds(DraftSource("random head", spec, head=head), player.runner)
    # What is drawn must be there when drafts are made right.
    player.runner.head.head.ways.draws_without_logits = False
    _replay(kept)
    return engine


@triton.jit
def _make_right(trace, turn, picked, tokens, count, DRAFTS: tl.constexpr, PLACES: tl.constexpr):
    now = tl.load(turn)
    place = tl.arange(0, PLACES)
    inside = place < DRAFTS
    drawn = tl.load(picked + place, mask=inside, other=-7)
    tl.store(tokens + 1 + place, tl.where(place < tl.load(trace + now % count), drawn, -7), mask=inside)
    tl.store(turn, now + 1)


def _replay(kept: list[int]) -> None:
    """From now on as many drafts are kept as in the trace: those are made to agree with what was drawn. Costs a
    round one short launch."""
    trace = torch.tensor(kept, dtype=torch.int32, device="cuda")
    turn = torch.zeros(1, dtype=torch.int32, device="cuda")
    accept = cuda_rounds.accept

    def replayed(
        lane_slots: Any, starts: Any, queries: Any, draws: Any, picked: Any, tokens: Any, *rest: Any
    ) -> None:
        drafts = rest[-1]
        _make_right[(1,)](
            trace, turn, picked, tokens, len(kept), DRAFTS=drafts, PLACES=MOST_DRAFTS, num_warps=1
        )
        accept(lane_slots, starts, queries, draws, picked, tokens, *rest)

    cuda_rounds.accept = replayed  # type: ignore[assignment]


def _decode(engine: Engine) -> float:
    """Tokens per second of one request after its first token."""
    engine.add(list(range(10, 42)), SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    first_s = 0.0
    while engine.has_work:
        for done in engine.step().finished:
            assert done.error is None, done.error
            first_s = done.story.first_token_s or 0.0
    return (TOKENS - 1) / (time.perf_counter() - first_s)


if __name__ == "__main__":
    main()
