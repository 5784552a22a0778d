"""What a draft head brings on a GPU: a step's cost with 1 to 8 drafts, and the length that the engine predicts to
be best against the best one measured. Weights are random, shapes are real; how many drafts are kept in each round
is replayed from a recorded run of a real model with a trained head.

    python benchmarks/gpu_rounds.py --record MODEL --head FOLDER --trace results/kept_drafts.json   # a real model
    python benchmarks/gpu_rounds.py --model llama-3.1-8b --trace results/kept_drafts.json           # another shape
"""

import argparse
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
from cumulo.bench.speculate import chat_prompts  # noqa: E402
from cumulo.engine.assembly import free_memory, start_engine  # noqa: E402
from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.decide.speculation.rounds import RoundPolicy  # noqa: E402
from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.engine.llm import LLM  # noqa: E402
from cumulo.engine.memory.memory_plan import plan_memory  # noqa: E402
from cumulo.engine.play import cuda_rounds  # noqa: E402
from cumulo.engine.play.draft_source import DraftSource, attach_rounds  # noqa: E402
from cumulo.models.heads.eagle import EagleHead  # noqa: E402
from cumulo.spec.from_huggingface import spec_from_config  # noqa: E402
from cumulo.spec.model import ModelSpec  # noqa: E402

TOKENS = 256
MOST_DRAFTS = 8
DRAFT_VOCABULARY = 32_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", help="a model whose head's kept drafts become the trace")
    parser.add_argument("--head", help="the folder of that head")
    parser.add_argument("--model", help="whose shape is measured, by its name in workloads.json")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if chosen.record:
        kept = record(chosen.record, chosen.head)
        chosen.trace.write_text(json.dumps({"drafts": MOST_DRAFTS, "kept": kept}) + "\n")
        print(f"{len(kept)} rounds, {statistics.fmean(kept):.2f} of {MOST_DRAFTS} drafts kept on average")
    if chosen.model:
        measured = measure(chosen.model, json.loads(chosen.trace.read_text())["kept"])
        if chosen.json:
            chosen.json.write_text(json.dumps(measured, indent=1) + "\n")


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


def measure(name: str, kept: list[int]) -> dict[str, Any]:
    spec = spec_from_config(FILE["models"][name])
    engine = _engine(spec, kept)
    policy = engine.scheduler.speculation
    assert isinstance(policy, RoundPolicy)
    rates: dict[int, float] = {}
    for drafts in range(MOST_DRAFTS + 1):
        policy.fixed_count = drafts
        _decode(engine)
        rates[drafts] = statistics.median(_decode(engine) for _ in range(3))
        print(
            f"{name}, {drafts} drafts: {rates[drafts]:7.0f} tok/s, {rates[drafts] / rates[0]:.2f}x",
            flush=True,
        )
    policy.fixed_count = None
    chosen = statistics.median(_decode(engine) for _ in range(3))
    best = max(rates, key=lambda drafts: rates[drafts])
    predicted, gain = policy.best(1)
    print(f"{name}, as it chooses: {chosen:7.0f} tok/s, {chosen / rates[0]:.2f}x; predicted best {predicted.drafts}"
          f" drafts ({gain:.2f}x), measured best {best} ({rates[best] / rates[0]:.2f}x)")  # fmt: skip
    rounds = {drafts: seconds for drafts, (seconds, _) in policy._learnt(1).rounds.items()}
    return {"model": name, "tokens_per_s": rates, "chosen": chosen, "predicted": predicted.drafts, "best": best,
            "round_s": rounds, "plain_s": policy._learnt(1).plain[0]}  # fmt: skip


def _engine(spec: ModelSpec, kept: list[int]) -> Engine:
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
    head = EagleHead(own, 3 * spec.hidden, min(DRAFT_VOCABULARY, spec.vocab_size), dtype=torch.bfloat16)
    for parameter in head.parameters():
        parameter.data.normal_(std=0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    attach_rounds(DraftSource("random head", spec, head=head), player.runner)
    _replay(kept)
    return engine


def _replay(kept: list[int]) -> None:
    """From now on as many drafts are kept as in the trace: those are made to agree with what was drawn."""
    trace = torch.tensor(kept, dtype=torch.int32, device="cuda")
    turn = torch.zeros(1, dtype=torch.int64, device="cuda")
    places = torch.arange(MOST_DRAFTS, dtype=torch.int32, device="cuda")
    accept = cuda_rounds.accept

    def replayed(
        lane_slots: Any, starts: Any, queries: Any, draws: Any, picked: Any, tokens: Any, *rest: Any
    ) -> None:
        drafts = rest[-1]
        right = places[:drafts] < trace[turn]
        tokens[1 : drafts + 1].copy_(torch.where(right, picked[:drafts], -7))
        turn.add_(1).remainder_(len(trace))
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
