"""Prefill and decode engines on one GPU, each over its own ranks: KV goes from rank to rank by CUDA IPC. Do they
say what one engine says?

    nvidia-cuda-mps-control -d        # lets kernels of several processes run side by side
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/gpu_roles.py --model MODEL.gguf --tp 3
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_agreement import prompts, texts
from benchmarks.gpu_rank_answers import agreement, padded
from cumulo.engine.assembly import Assembly, assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.play.ranked_runner import RankedRunner

CONTEXT, STEP, TOKENS = 2048, 512, 32
SPAWN = multiprocessing.get_context("spawn")


def told(what: str) -> None:
    """Where a run that hangs had come to."""
    name, now = multiprocessing.current_process().name, time.strftime("%H:%M:%S")
    print(f"  {now} {name}: {what}", file=sys.stderr, flush=True)


def watched(assembly: Assembly, after_s: float) -> threading.Timer:
    """If it is not cancelled: where this engine's ranks stand then, and how many steps each has played."""
    runner = assembly.player.runner

    def look() -> None:
        faulthandler.dump_traceback()
        if isinstance(runner, RankedRunner):
            told(f"steps of the ranks: {[state.steps for state in runner.rank_states()]}")
            for rank in runner.ranks.pids:
                told(f"rank {rank} stands at\n{runner.ranks.stack_text(rank)}")

    timer = threading.Timer(after_s, look)
    timer.daemon = True
    timer.start()
    return timer


def started(model: str | None, device: str, tp: int, **role: Any) -> Assembly:
    config = EngineConfig(
        device=device,
        max_context=CONTEXT,
        max_tokens_per_step=STEP,
        kv_memory_gib=1,
        max_running=32,
        tp=tp,
        transfer_stall_s=10.0
        if device == "cuda"
        else 60.0,  # a busy core takes long for a step of 512 tokens
        **role,
    )
    found = assemble(model, config, False, None)
    told(f"{role.get('role', 'one engine')}: {found.runs_on}")
    return found


def asked(assembly: Assembly, count: int) -> None:
    """Long prompts, each a page of documentation and a question."""
    tokenizer, pages = assembly.model.tokenizer, texts()
    assert tokenizer is not None
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for index, question in enumerate(prompts(count)):
        ids = tokenizer.encode(f"{index}. {pages[index % len(pages)]}\n\n{question}\n")
        assembly.engine.add(ids, params, request_id=f"r{index}")


def one_engine(model: str | None, device: str, count: int) -> dict[str, Any]:
    assembly = started(model, device, 1)
    asked(assembly, count)
    said: dict[str, list[int]] = {}
    while assembly.engine.has_work:
        said |= {o.request_id: o.samples[0].token_ids for o in assembly.engine.step().finished}
    assembly.player.runner.close()
    return {"said": said}


def in_own_process(
    function: Callable[..., dict[str, Any]], limit_s: float, *arguments: Any
) -> dict[str, Any]:
    """Its result. One process holds one engine over several GPUs."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_tell, args=(theirs, function, arguments), name=function.__name__)
    process.start()
    theirs.close()
    try:
        return heard(ours, process.name, limit_s)  # type: ignore[no-any-return]
    finally:
        process.join(10)
        process.kill()


def _tell(word: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    word.send(function(*arguments))


def heard(word: Connection, name: str, limit_s: float) -> Any:
    if not word.poll(limit_s):
        raise SystemExit(f"{name} said nothing for {limit_s:g} s")
    try:
        return word.recv()
    except EOFError:
        raise SystemExit(f"{name} ended without a result") from None


def prefill(model: str | None, device: str, tp: int, address: str, word: Connection, stuck_s: float) -> None:
    """Computes prompts until it is told to end."""
    assembly = started(model, device, tp, role="prefill", transfer_address=address)
    engine, link = assembly.engine, assembly.engine.link
    assert link is not None
    word.send("ready")
    timer: threading.Timer | None = None
    while not word.poll():
        if not engine.has_work or engine.idle:
            select.select([link], [], [], 0.01)
        engine.exchange()
        if engine.has_work:
            timer = timer or watched(assembly, stuck_s)
            engine.step()
    if timer is not None:
        timer.cancel()
    link.close()
    assembly.player.runner.close()


def decode(
    model: str | None, device: str, tp: int, address: str, count: int, stuck_s: float
) -> dict[str, Any]:
    assembly = started(model, device, tp, role="decode", prefill_engines=(f"p0={address}",))
    engine, link = assembly.engine, assembly.engine.link
    assert link is not None
    transfers = engine.scheduler.transfers
    while not transfers.peers:
        select.select([link], [], [], 1.0)
        engine.exchange()
    told("the engines have met")
    timer = watched(assembly, stuck_s)
    asked(assembly, count)
    said: dict[str, list[int]] = {}
    began_s = time.perf_counter()
    while engine.has_work or transfers.active:
        if engine.idle or not engine.has_work:
            select.select([link], [], [], 0.01)
        engine.exchange()
        if engine.has_work:
            said |= {o.request_id: o.samples[0].token_ids for o in engine.step().finished}
    timer.cancel()
    told(f"{len(said)} answers")
    seconds, problems = time.perf_counter() - began_s, engine.scheduler.problems()
    found = {"said": said, "landed": transfers.landed, "failed": transfers.failed, "seconds": seconds}
    link.close()
    assembly.player.runner.close()
    return found | {"problems": problems, "runs on": assembly.runs_on}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="its file; none: the built-in model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--stuck", type=float, default=30.0, help="seconds after which stacks are printed")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that each engine may take")
    chosen = parser.parse_args()
    sides = (chosen.model, chosen.device)
    one = in_own_process(one_engine, chosen.limit, *sides, chosen.prompts)
    with tempfile.TemporaryDirectory() as folder:
        address, (ours, theirs) = f"unix:{folder}/prefill.sock", SPAWN.Pipe()
        process = SPAWN.Process(
            target=prefill, args=(*sides, chosen.tp, address, theirs, chosen.stuck), name="prefill"
        )
        process.start()
        theirs.close()
        try:
            assert heard(ours, "the prefill engine", chosen.limit) == "ready"
            split = in_own_process(
                decode, chosen.limit, *sides, chosen.tp, address, chosen.prompts, chosen.stuck
            )
        finally:
            with contextlib.suppress(BrokenPipeError):  # it may have died
                ours.send("end")
            process.join(10)
            process.kill()
    names = sorted(one["said"])
    several, alone = ([side["said"][name] for name in names] for side in (split, one))
    share, diverged = agreement(padded(several, alone), padded(alone, several))
    print(f"roles, tp {chosen.tp}, {split['runs on']}: {split['landed']} of {len(names)} prompts came by transfer, "
          f"{split['failed']} failed, {len(split['problems'])} problems; greedy agreement {share:.2f}%, {diverged} "
          f"answers diverge; {split['seconds']:.2f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
