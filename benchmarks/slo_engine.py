"""Goodput of the real engine under an SLO, with a trace scaled to this machine: `--slo` against fixed steps.

    python benchmarks/slo_engine.py AzureLLMInferenceTrace_conv.csv

Prompts and answers are a sixteenth of the trace's. The SLO is scaled as well: on the GPU that the trace's objective
(TTFT 1 s, ITL 50 ms) suits, an average prompt takes about 31 ms, so here TTFT is 32 and ITL 1.6 times what an
average prompt takes, measured first. Request rates are relative to one prompt after the other. With `--clock cpu`
all times are CPU seconds of this process, so that a machine that others use, too, can be measured on.
"""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path

from cumulo.base.report import Row, write_json
from cumulo.engine import engine as engine_module
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.decide.slo.promises import learning_prompts
from cumulo.engine.engine import Engine
from cumulo.engine.llm import LLM
from cumulo.engine.play import runner_torch as runner_module
from cumulo.errors import Overloaded
from cumulo.load.simulated import read_any_trace
from cumulo.spec.slo import ITL_SHARE, Slo

SHRINK = 16
LONGEST = 480  # tokens of a scaled prompt
WAYS = {"32-token steps": (32, False), "512-token steps": (512, False), "--slo": (512, True)}


class Clock:
    """Seconds for everybody here: the wall's, or those in which this process computed; waiting is free then."""

    def __init__(self, kind: str) -> None:
        self._read, self._skipped_s = (time.perf_counter if kind == "wall" else time.process_time), 0.0
        self._wall = kind == "wall"

    def perf_counter(self) -> float:
        return self._read() + self._skipped_s

    def wait(self, seconds: float) -> None:
        if self._wall:
            time.sleep(seconds)
        else:
            self._skipped_s += seconds


@dataclass(slots=True)
class Asked:
    arrived_s: float
    prompt: int
    output: int
    token_s: list[float] = field(default_factory=list)
    refused: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument(
        "--loads", default="0.6,1.2", help="requests arrive so often, over one prompt at a time"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    clock = Clock(chosen.clock)
    engine_module.time = runner_module.time = clock  # type: ignore[assignment]
    trace = read_any_trace(chosen.trace).arrivals[: chosen.requests]
    lengths = [
        (max(1, min(LONGEST, one.prompt_tokens // SHRINK)), max(2, one.output_tokens // SHRINK))
        for one in trace
    ]
    prompt_s = _prompt_s(sum(prompt for prompt, _ in lengths) // len(lengths), chosen.threads)
    slo = Slo(32 * prompt_s, 1.6 * prompt_s)
    print(f"an average prompt takes {prompt_s * 1e3:.0f} ms: {slo}", flush=True)
    span_s = trace[-1].arrived_s - trace[0].arrived_s
    rows, best, least_kept = list[Row](), dict[str, float](), 1.0
    for load in map(float, chosen.loads.split(",")):
        squeeze = (len(trace) * prompt_s / load) / span_s
        for way, (tokens, promise) in WAYS.items():
            asked = [
                Asked((one.arrived_s - trace[0].arrived_s) * squeeze, *length)
                for one, length in zip(trace, lengths, strict=True)
            ]
            goodput, kept, refused = _play(asked, tokens, slo, promise, chosen.threads, clock)
            best[way] = max(best.get(way, 0.0), goodput)
            least_kept = min(least_kept, kept) if promise else least_kept
            print(
                f"load {load:4g} {way:16} goodput {goodput:6.3f}/s refused {refused:6.1%} kept {kept:7.2%}",
                flush=True,
            )
            rows.append(Row(f"{way}: goodput at load {load:g}", goodput, "requests/s"))
    fixed = max(goodput for way, goodput in best.items() if way != "--slo")
    rows.append(
        Row("--slo: goodput, over the better fixed step", best["--slo"] / max(fixed, 1e-9), "×", must=1.3)
    )
    rows.append(Row("--slo: promises kept, at the worst load", 100 * least_kept, "%", must=99.0))
    for row in rows[-2:]:
        print(
            f"{row.name:48} {row.value:.4g} {row.unit} (must {row.must:g}{'' if row.ok else ', NOT REACHED'})"
        )
    write_json(chosen.json, rows)


def _llm(tokens: int, slo: Slo | None, threads: int | None) -> LLM:
    config = EngineConfig(
        max_running=32, max_tokens_per_step=tokens, max_context=1024, kv_memory_gib=0.5, threads=threads, slo=slo,
        prefix_cache=False, overlap=False,
    )  # fmt: skip
    return LLM(config=config)


def _prompt_s(tokens: int, threads: int | None) -> float:
    with _llm(512, None, threads) as llm:
        times = []
        for _ in range(6):
            (output,) = llm.generate([[200] * tokens], SamplingParams(max_tokens=1, ignore_eos=True))
            times.append(output.story.ttft_s or 0.0)
    return sorted(times[1:])[len(times) // 2]


def _play(
    asked: list[Asked], tokens: int, slo: Slo, promise: bool, threads: int | None, clock: Clock
) -> tuple[float, float, float]:
    """Goodput in requests per second, the share of admitted requests that kept the SLO, the share refused."""
    with _llm(tokens, slo if promise else None, threads) as llm:
        engine = llm.engine
        if promise:
            # As the server does before it is ready.
            for length in learning_prompts(lambda: engine.scheduler.slo.promises, llm.max_context):
                engine.add([300] * length, SamplingParams(max_tokens=3, ignore_eos=True))
                while engine.has_work:
                    engine.step()
        _serve(engine, asked, clock)
    admitted = [one for one in asked if not one.refused]
    kept = sum(_kept(one, slo) for one in admitted)
    span_s = asked[-1].arrived_s - asked[0].arrived_s
    return kept / span_s, kept / max(1, len(admitted)), 1 - len(admitted) / len(asked)


def _serve(engine: Engine, asked: list[Asked], clock: Clock) -> None:
    began_s, coming = clock.perf_counter(), 0
    while coming < len(asked) or engine.has_work:
        now_s = clock.perf_counter() - began_s
        while coming < len(asked) and asked[coming].arrived_s <= now_s:
            one = asked[coming]
            params = SamplingParams(max_tokens=one.output, ignore_eos=True, temperature=0)
            try:
                engine.add([100 + coming] * one.prompt, params, request_id=str(coming), stream=True)
            except Overloaded:
                one.refused = True
            coming += 1
        if not engine.has_work:
            clock.wait(max(0.0, asked[coming].arrived_s - (clock.perf_counter() - began_s)))
            continue
        output, now_s = engine.step(), clock.perf_counter() - began_s
        for delta in output.deltas:
            asked[int(delta.request_id)].token_s += [now_s] * len(delta.token_ids)


def _kept(one: Asked, slo: Slo) -> bool:
    if len(one.token_s) < one.output or one.token_s[0] - one.arrived_s > (slo.ttft_s or 0.0):
        return False
    gaps = [later - earlier for earlier, later in zip(one.token_s, one.token_s[1:], strict=False)]
    return sum(gap > (slo.itl_s or 0.0) for gap in gaps) <= (1 - ITL_SHARE) * len(gaps)


if __name__ == "__main__":
    main()
