"""Prefill and decode engines on one GPU, each over its own ranks: KV goes from rank to rank by CUDA IPC. Do they
say what one engine says?

    nvidia-cuda-mps-control -d        # lets kernels of several processes run side by side
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 python benchmarks/gpu_roles.py --model MODEL.gguf --tp 3
"""

import argparse
import multiprocessing
import select
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_agreement import prompts, texts
from benchmarks.gpu_ranks import agreement, padded
from cumulo.engine.assembly import Assembly, assemble
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams

CONTEXT, STEP, TOKENS = 2048, 512, 32
SPAWN = multiprocessing.get_context("spawn")


def started(model: str | None, device: str, tp: int, **role: Any) -> Assembly:
    config = EngineConfig(
        device=device,
        max_context=CONTEXT,
        max_tokens_per_step=STEP,
        kv_memory_gib=1,
        max_running=32,
        tp=tp,
        **role,
    )
    return assemble(model, config, False, None)


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


def in_own_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Its result. One process holds one engine over several GPUs."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_tell, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()  # type: ignore[no-any-return]
    except EOFError:
        raise SystemExit(f"{function.__name__} ended without a result") from None
    finally:
        process.join(20)
        process.kill()


def _tell(word: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    word.send(function(*arguments))


def prefill(model: str | None, device: str, tp: int, address: str, word: Connection) -> None:
    """Computes prompts until the other end of `word` is closed."""
    assembly = started(model, device, tp, role="prefill", transfer_address=address)
    engine, link = assembly.engine, assembly.engine.link
    assert link is not None
    word.send("ready")
    while not word.poll():
        if not engine.has_work or engine.idle:
            select.select([link], [], [], 0.01)
        engine.exchange()
        if engine.has_work:
            engine.step()
    link.close()
    assembly.player.runner.close()


def decode(model: str | None, device: str, tp: int, address: str, count: int) -> dict[str, Any]:
    assembly = started(model, device, tp, role="decode", prefill_engines=(f"p0={address}",))
    engine, link = assembly.engine, assembly.engine.link
    assert link is not None
    transfers = engine.scheduler.transfers
    while not transfers.peers:
        select.select([link], [], [], 1.0)
        engine.exchange()
    asked(assembly, count)
    said: dict[str, list[int]] = {}
    began_s = time.perf_counter()
    while engine.has_work or transfers.active:
        if engine.idle or not engine.has_work:
            select.select([link], [], [], 0.01)
        engine.exchange()
        if engine.has_work:
            said |= {o.request_id: o.samples[0].token_ids for o in engine.step().finished}
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
    chosen = parser.parse_args()
    sides = (chosen.model, chosen.device)
    one = in_own_process(one_engine, *sides, chosen.prompts)
    with tempfile.TemporaryDirectory() as folder:
        address, (ours, theirs) = f"unix:{folder}/prefill.sock", SPAWN.Pipe()
        process = SPAWN.Process(target=prefill, args=(*sides, chosen.tp, address, theirs))
        process.start()
        theirs.close()
        assert ours.recv() == "ready"
        try:
            split = in_own_process(decode, *sides, chosen.tp, address, chosen.prompts)
        finally:
            ours.send("end")
            process.join(20)
            process.kill()
    names = sorted(one["said"])
    several, alone = ([side["said"][name] for name in names] for side in (split, one))
    share, diverged = agreement(padded(several, alone), padded(alone, several))
    print(f"roles, tp {chosen.tp}, {split['runs on']}: {split['landed']} of {len(names)} prompts came by transfer, "
          f"{split['failed']} failed, {len(split['problems'])} problems; greedy agreement {share:.2f}%, {diverged} "
          f"answers diverge; {split['seconds']:.2f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
