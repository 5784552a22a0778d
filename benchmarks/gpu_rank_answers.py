"""Answers of a real model on one GPU through `LLM`, as users have it: does an engine of several ranks say what one
rank says, and what is a caller told when a rank is killed? Run by `benchmarks/gpu_ranks.py --answers`."""

import itertools
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu_agreement import answers as greedy_answers
from benchmarks.gpu_agreement import prompts
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import Guide, SamplingParams
from cumulo.engine.llm import LLM
from cumulo.engine.play.ranked_runner import RankedRunner
from cumulo.errors import CumuloError
from cumulo.layout.serving import ServingLayout


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> tuple[float, int]:
    """Of the tokens up to and including the first that differs, the share that are equal, in percent; and how many
    answers diverge. What follows a divergence answers another question, and is not compared."""
    same = positions = diverged = 0
    for a, b in zip(ours, theirs, strict=True):
        agree = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        same, positions, diverged = (
            same + agree,
            positions + min(len(a), agree + 1),
            diverged + (agree < len(a)),
        )
    return 100 * same / positions, diverged


def answers_of(
    model: str | None, layout: ServingLayout, invariant: bool, questions: int, device: str, strikes: bool
) -> dict[str, Any]:
    config = EngineConfig(
        device=device, max_context=2048, kv_memory_gib=1, max_running=64, batch_invariant=invariant,
        tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep,
    )  # fmt: skip
    guide = Guide("regex", r'\{"city": "[A-Z][a-z]{2,12}", "people": [1-9][0-9]{2,6}\}')
    llm = LLM(model, config=config, keep_quantised=False)
    began_s = time.perf_counter()
    made = greedy_answers(llm, prompts(questions), 64)
    elapsed_s = time.perf_counter() - began_s
    question = [[{"role": "user", "content": "Name a city and its number of people as JSON."}]]
    params = SamplingParams(temperature=0.0, max_tokens=60, guide=guide, logprobs=2)
    guided = llm.chat(question, params)[0].samples[0] if find_spec("llguidance") else None
    sampled = llm.chat(question * 4, SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=40))
    found = {
        "answers": made, "guided": guided and guided.text, "seconds": elapsed_s,
        "sampled": [one.samples[0].token_ids for one in sampled],
        "tok/s": round(sum(map(len, made)) / elapsed_s), "runs_on": llm.runs_on,
    }  # fmt: skip
    if strikes:
        found["killed"] = kill_a_rank(llm)
    llm.close()
    return found


def compare_answers(
    model: str | None, layout: ServingLayout, kinds: tuple[bool, ...], questions: int, device: str, kill: bool
) -> dict[str, Any]:
    """Through `LLM`, as users have it: the answers of one rank and of several to the same questions, what they say
    under a schema, and what happens when a rank is killed in mid-answer."""
    said: dict[str, Any] = {}
    for invariant, ranks in itertools.product(kinds, (ServingLayout(), layout)):
        # In a process of its own, as `cumulo serve` has it: one process holds one engine over several GPUs.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            strikes = kill and ranks.world > 1 and invariant == kinds[-1]
            found = pool.submit(answers_of, model, ranks, invariant, questions, device, strikes).result()
        said[f"{ranks}{' invariant' if invariant else ''}"] = found
        print(f"{ranks}{' invariant' if invariant else ''}: {found['runs_on']}, {found['seconds']:.1f} s",
              flush=True)  # fmt: skip
        if strikes:
            print(f"killed: {found['killed']}", flush=True)
    rows: dict[str, Any] = {}
    for kind in (" invariant" if invariant else "" for invariant in kinds):
        one, several = said[f"{ServingLayout()}{kind}"], said[f"{layout}{kind}"]
        share, diverged = agreement(
            padded(several["answers"], one["answers"]), padded(one["answers"], several["answers"])
        )
        rows[f"{layout}{kind}"] = {
            "greedy agreement %": round(share, 2), "answers that diverge": diverged, "of": questions,
            "whole answers alike %": round(100 - 100 * diverged / questions, 2),
            "guided": several["guided"], "guided alike": several["guided"] == one["guided"],
            "sampled alike": several["sampled"] == one["sampled"], "tok/s": several["tok/s"],
            "one rank tok/s": one["tok/s"], "runs on": several["runs_on"],
        }  # fmt: skip
    return rows


def padded(ours: list[list[int]], theirs: list[list[int]]) -> list[list[int]]:
    """As long as the other side's, so that an early end counts as a divergence."""
    return [a + [-1] * (len(b) - len(a)) for a, b in zip(ours, theirs, strict=True)]


def kill_a_rank(llm: LLM) -> str:
    """What a caller is told, and after how long."""
    runner = llm._assembly.player.runner
    assert isinstance(runner, RankedRunner)
    killed_s = 0.0
    try:
        for index, _ in enumerate(
            llm.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
        ):
            if index == 20:
                killed_s = time.perf_counter()
                os.kill(next(iter(runner.ranks.pids.values())), signal.SIGKILL)
    except CumuloError as error:
        return f"{time.perf_counter() - killed_s:.2f} s after it was killed: {str(error).splitlines()[0]}"
    return "nobody was told"
