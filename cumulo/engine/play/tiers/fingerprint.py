"""Which model's KV blocks a file holds: equal fingerprints compute equal keys and values. Asked by the assembly.

It covers the weights, the architecture with its rotary settings, the number format, the block's size and layout,
and the kind of device. Of weight files it reads pieces, since whole ones would take minutes, and so it also covers
when they were written: a file that was changed is another one.
"""

import dataclasses
import json
from hashlib import blake2b
from pathlib import Path

from cumulo.base.files import sampled_digest
from cumulo.engine.config import EngineConfig
from cumulo.spec.model import ModelSpec

_LAYOUT = "layers, heads, tokens, dimensions; keys, then values"
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
        state.update(f"{file.suffix} {file.stat().st_mtime_ns} ".encode())
        state.update(sampled_digest(file))
    return state.digest()
