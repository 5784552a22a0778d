"""A pytest plugin that notes how our kernels are launched while their tests run on a GPU.

CUMULO_LAUNCHES=folder python3 -m tests.on_gpu -p tests.compile.record_launches
python -m tests.compile.record_launches folder       # writes cumulo/compile/stages/launches.json
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cumulo.compile.stages import launch
from cumulo.compile.stages.launch import KernelLaunch, recording

MOST = 1  # launch of a kernel that is kept


@pytest.fixture(scope="session", autouse=True)
def noted() -> Iterator[None]:
    found: dict[str, KernelLaunch] = {}
    with recording(found, "cumulo.kernels."):
        yield
    folder = Path(os.environ["CUMULO_LAUNCHES"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.json").write_text(json.dumps([one.as_json() for one in found.values()]))


# Kernels of collectives are launched by ranks in processes of their own, where the plugin is not. By function: the
# types of arguments and the constants, in the order of the source, and the warps.
_COLLECTIVE = "cumulo.kernels.cuda.collective"
BY_HAND = {
    "one_shot:_meet": ("flags=*i64 rank=i32 waits=i32 RANKS=4", 1),
    "one_shot:_release": ("flags=*i64 rank=i32 words=i32 RANKS=4 WORDS=128", 4),
    "one_shot:_sum": (
        "flags=*i64 partials=*i64 out=*bf16 elements=i32 rank=i32 waits=i32 KIND=bf16 ADD=True ROUND=True RANKS=4 "
        "BLOCK=2048", 8),
    "one_shot:_gather": ("slices=*i64 out=*bf16 width=i32 RANKS=4 BLOCK=2048", 4),
    "one_shot:_embed": ("token_ids=*i64 weight=*bf16 out=*bf16 first=i32 rows=i32 size=i32 BLOCK=4096", 4),
    "one_shot:_gather_rows": (
        "rows=*i64 starts=*i32 out=*bf16 size=i32 slice=i32 DATA_RANKS=2 SLICES=2 BLOCK=4096", 4),
    "one_shot:_sum_rows": (
        "partials=*i64 starts=*i32 out=*bf16 size=i32 data_rank=i32 KIND=bf16 RANKS=4 BLOCK=4096", 4),
    "one_shot:_gather_owned": ("rows=*i64 owners=*i32 out=*bf16 size=i32 slice=i32 SLICES=2 BLOCK=4096", 4),
    "passing:_pass": (
        "local=*bf16 inbox=*i64 awaited=*i64 raised=*i64 done=*i64 elements=i32 words=i32 rank=i32 peer=i32 "
        "waits=i32 PLACES=2 RECEIVE=False BLOCK=2048", 8),
    "passing:_send_tokens": (
        "draws=*i32 tokens=*i32 token_stride=i32 inbox=*i64 arrived=*i64 taken=*i64 sent=*i64 rows=i32 words=i32 "
        "rank=i32 peer=i32 waits=i32 COLUMNS=8 SLOT=0 POSITION=1 PLACES=2 BLOCK=256", 4),
    "passing:_take_tokens": (
        "tokens=*i32 token_stride=i32 inbox=*i64 arrived=*i64 taken=*i64 received=*i64 words=i32 rank=i32 peer=i32 "
        "waits=i32 PLACES=2 BLOCK=256", 4),
}  # fmt: skip


def by_hand() -> Iterator[dict[str, object]]:
    for name, (told, warps) in BY_HAND.items():
        pairs = dict(one.split("=") for one in told.split())
        constants = {key: launch.constant(value) for key, value in pairs.items() if key.isupper()}
        signature = {key: "constexpr" if key.isupper() else value for key, value in pairs.items()}
        pointers = [str(at) for at, value in enumerate(signature.values()) if value.startswith("*")]
        yield KernelLaunch(
            f"{_COLLECTIVE}.{name}", signature, constants,
            {at: [["tt.divisibility", 16]] for at in pointers}, {"num_warps": warps},
        ).as_json()  # fmt: skip


def keep(folder: Path) -> list[dict[str, object]]:
    """Of each kernel the launches with the most work: large constants."""
    by_kernel: dict[str, list[dict[str, object]]] = {}
    for path in sorted(folder.glob("*.json")):
        for raw in json.loads(path.read_text()):
            launches = by_kernel.setdefault(raw["kernel"], [])
            if raw not in launches:
                launches.append(raw)
    for raw in by_hand():
        by_kernel[str(raw["kernel"])] = [raw]
    kept = []
    for name in sorted(by_kernel):
        kept += sorted(by_kernel[name], key=lambda raw: (-_size(raw), json.dumps(raw)))[:MOST]
    return kept


def _size(raw: dict[str, object]) -> int:
    constants = raw.get("constants", {})
    assert isinstance(constants, dict)
    return sum(value for value in constants.values() if isinstance(value, int) and value < 1 << 16)


if __name__ == "__main__":
    kept = keep(Path(sys.argv[1]))
    lines = ",\n".join(json.dumps(raw) for raw in kept)
    launch.RECORDED.write_text(f"[\n{lines}\n]\n")
    print(f"{len(kept)} launches of {len({raw['kernel'] for raw in kept})} kernels")
