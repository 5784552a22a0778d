"""Does the GPU say what the CPU says? Greedy answers of the built-in model on the GPU in bfloat16 against the CPU
engine in float32 from the same file, over 200 prompts; and log-probabilities of the same tokens on both.

    python benchmarks/gpu_agreement.py --json results/gpu_agreement.json
    python benchmarks/gpu_agreement.py --save-cpu said.json      # the CPU's side, on another machine;
    python benchmarks/gpu_agreement.py --cpu said.json           # the GPU's, compared with it

The error bfloat16 may make is measured, not chosen: what torch's own operators in bfloat16 lose against
float32 on the same texts stands beside ours.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from cumulo.engine.config import EngineConfig  # noqa: E402
from cumulo.engine.decide.params import SamplingParams  # noqa: E402
from cumulo.engine.llm import LLM  # noqa: E402

QUESTIONS = (
    "What is the capital of {}?", "Write one sentence about {}.", "Name three things found in {}.",
    "Explain {} to a child.", "What is the opposite of {}?", "Translate '{}' into French.",
    "Write a short poem about {}.", "List the steps to learn about {}.",
)  # fmt: skip
SUBJECTS = (
    "France", "the sea", "bread", "a forest", "time", "Japan", "music", "the moon", "a library", "rain",
    "friendship",
    "Brazil", "a bicycle", "winter", "numbers", "a river", "sleep", "gold", "the wind", "a garden", "Egypt",
    "light", "a clock", "honesty", "stone",
)  # fmt: skip


def prompts(count: int) -> list[str]:
    made = [question.format(subject) for subject in SUBJECTS for question in QUESTIONS]
    return made[:count]


def texts() -> list[str]:
    """Plain prose for log-probabilities: paragraphs of the project's own documentation."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        found += [
            p
            for p in re.split(r"\n\s*\n", page.read_text())
            if len(p) > 400 and "|" not in p and "```" not in p
        ]
    return [text[:1200] for text in found[:24]]


def answers(llm: LLM, questions: list[str], tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    outputs = llm.chat([[{"role": "user", "content": q}] for q in questions], params)
    return [output.samples[0].token_ids for output in outputs]


def log_probabilities(llm: LLM, pages: list[str]) -> torch.Tensor:
    outputs = llm.generate(pages, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    return torch.tensor(
        [e.logprob for o in outputs for e in o.prompt_logprobs or [] if e is not None], dtype=torch.float64
    )


CPU = "cpu float32"
SIDES = {
    CPU: EngineConfig(device="cpu", max_running=64, max_context=2048),
    "cpu bfloat16, torch": EngineConfig(device="cpu", dtype="bfloat16", max_running=64, max_context=2048),
    "gpu bfloat16": EngineConfig(device="cuda", max_context=2048, kv_memory_gib=4),
    "gpu bfloat16, batch-invariant": EngineConfig(
        device="cuda", max_context=2048, kv_memory_gib=4, batch_invariant=True
    ),
    "gpu, fp8 weights": EngineConfig(device="cuda", max_context=2048, kv_memory_gib=4, weights="fp8"),
    "gpu, fp8 KV": EngineConfig(device="cuda", max_context=2048, kv_memory_gib=4, kv_dtype="fp8"),
}


@dataclass
class Side:
    """What one side said: log-probabilities of the pages' tokens, and answers to the questions."""

    known: list[float]
    said: list[list[int]]


def ask(name: str, model: str | None, questions: list[str], pages: list[str], tokens: int) -> Side:
    llm = LLM(model, config=SIDES[name], keep_quantised=False)
    known = log_probabilities(llm, pages).tolist()
    said = [] if "torch" in name else answers(llm, questions, tokens)
    llm.close()
    print(f"{name}: done, {llm.runs_on}", flush=True)
    return Side(known, said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default=None)
    parser.add_argument("--save-cpu", type=Path, help="only the CPU's side, into this file")
    parser.add_argument("--cpu", type=Path, help="the CPU's side, from this file")
    parser.add_argument("--json", default="")
    chosen = parser.parse_args()
    questions, pages, tokens = prompts(chosen.prompts), texts(), chosen.tokens
    if chosen.cpu:
        kept = json.loads(chosen.cpu.read_text())
        questions, pages, tokens = kept["questions"], kept["pages"], kept["tokens"]
        sides = {name: Side(**side) for name, side in kept["sides"].items()}
    else:
        sides = {name: ask(name, chosen.model, questions, pages, tokens) for name in SIDES if "cpu" in name}
    if chosen.save_cpu:
        both = {name: asdict(side) for name, side in sides.items()}
        kept = {"questions": questions, "pages": pages, "tokens": tokens, "sides": both}
        chosen.save_cpu.write_text(json.dumps(kept))
        return
    for name in SIDES:
        if "gpu" in name:
            sides[name] = ask(name, chosen.model, questions, pages, tokens)
    rows = compare(sides)
    for row in rows:
        print(row)
    if chosen.json:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(chosen.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


def compare(sides: dict[str, Side]) -> list[dict[str, Any]]:
    rows = []
    for name, side in sides.items():
        if "gpu" not in name:
            continue
        same = positions = diverged = 0
        for ours, theirs in zip(side.said, sides[CPU].said, strict=True):
            agree = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                min(len(ours), len(theirs)),
            )
            ended = agree == len(ours) == len(theirs)
            same, positions, diverged = same + agree, positions + agree + (not ended), diverged + (not ended)
        must = None if "fp8" in name else 95  # 8 bits are coarser: their figures have no bar
        rows.append({
            "name": f"greedy tokens equal to the CPU's, up to the first divergence ({name})",
            "value": round(100 * same / positions, 2), "unit": "%", "better": "higher", "must": must, "aim": None,
            "ok": must and 100 * same / positions >= must, "positions": positions,
            "answers_that_diverge": diverged, "answers": len(side.said),
        })  # fmt: skip
    exact = torch.tensor(sides[CPU].known, dtype=torch.float64)
    allowed = float(
        (torch.tensor(sides["cpu bfloat16, torch"].known, dtype=torch.float64) - exact).abs().mean()
    )
    for name in ("gpu bfloat16", "gpu bfloat16, batch-invariant"):
        error = (torch.tensor(sides[name].known, dtype=torch.float64) - exact).abs()
        rows.append({
            "name": f"log-probabilities, mean absolute difference to the CPU's float32 ({name})",
            "value": round(float(error.mean()), 5), "unit": "nats", "better": "lower",
            "must": round(2 * allowed, 5), "aim": round(allowed, 5), "ok": bool(error.mean() <= 2 * allowed),
            "largest": round(float(error.max()), 4), "tokens": len(exact),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
