"""Which model's KV blocks a file holds: equal fingerprints compute equal keys and values. Asked by the assembly.

It covers the weights, the architecture with its rotary settings, the number format, the block's size and layout,
and the kind of device. Of weight files it reads the beginning, the end and some pieces between: whole ones would
take minutes.
"""

import dataclasses
import json
from hashlib import blake2b
from pathlib import Path

from cumulo.engine.config import EngineConfig
from cumulo.spec.model import ModelSpec

_LAYOUT = "layers, heads, tokens, dimensions; keys, then values"
_PIECES, _PIECE_BYTES = 64, 1 << 16
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".json")


def kv_fingerprint(path: Path, spec: ModelSpec, config: EngineConfig, runs_on: str) -> bytes:
    """`runs_on`: which code computes, since other kernels round differently."""
    state = blake2b(digest_size=16, person=b"cumulo-kv-model")
    facts = {
        "spec": dataclasses.asdict(spec),
        "layout": _LAYOUT,
        "runs_on": runs_on,
        **{name: getattr(config, name) for name in ("device", "dtype", "kv_dtype", "weights", "block_size")},
    }
    state.update(json.dumps(facts, sort_keys=True, default=str).encode())
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.suffix in _WEIGHTS)
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.suffix} {size} ".encode())
        with file.open("rb") as opened:
            step = max(_PIECE_BYTES, size // _PIECES)
            for start in (*range(0, size, step), max(0, size - _PIECE_BYTES)):
                opened.seek(start)
                state.update(opened.read(_PIECE_BYTES))
    return state.digest()
