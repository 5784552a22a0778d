"""Model files that a hostile hand has changed, each a small difference from a tiny good model. Used by
test_hostile_files.py; run as a program it tries to load every one of them under a memory limit and says what came
of it, one JSON line each."""

import json
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]
MEMORY_BYTES = 3 << 30  # of address space beyond what the process has when it begins


def _json(name: str, **fields: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**content, **fields}))

    return change


def _tokenizer(edit: Callable[[dict[str, Any]], None]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))

    return change


def _added_id(token_id: Any) -> Change:
    return _tokenizer(lambda content: content["added_tokens"][-1].update(id=token_id))


def _word_id(token_id: Any) -> Change:
    return _tokenizer(
        lambda content: content["model"]["vocab"].update({next(iter(content["model"]["vocab"])): token_id})
    )


def _normalizer(rule: dict[str, Any] | list[dict[str, Any]]) -> Change:
    whole = {"type": "Sequence", "normalizers": rule} if isinstance(rule, list) else rule
    return _tokenizer(lambda content: content.update(normalizer=whole))


def _replace(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _words(pattern: str) -> Change:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _tokenizer(
        lambda content: content.update(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]}
        )
    )


def _text(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text) and None


def _header(edit: Callable[[dict[str, Any]], None]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        edit(header)
        packed = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(packed)) + packed + content[8 + size :])

    return change


def _header_bytes(size: int) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(struct.pack("<Q", size) + path.read_bytes()[8:])

    return change


def _overlap(header: dict[str, Any]) -> None:
    first, second, *_ = (name for name in header if name.endswith("layernorm.weight"))
    header[second]["data_offsets"] = header[first]["data_offsets"]


def _index(shard: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"lm_head.weight": shard}})
        )

    return change


def _rope(**fields: Any) -> Change:
    return _json("config.json", rope_scaling=fields)


def _unigram(count: int, length: int) -> Change:
    words = [[f"{number:0{length}}", -1.0] for number in range(count)]
    return _tokenizer(lambda content: content.update(model={"type": "Unigram", "unk_id": 0, "vocab": words}))


def _added(count: int, length: int) -> Change:
    tokens = [
        {"id": 600 + number, "content": f"{number:0{length}}", "special": True} for number in range(count)
    ]
    return _tokenizer(lambda content: content["added_tokens"].extend(tokens))


_NESTED = "[" * 200_000 + "]" * 200_000
FOLDER_CASES: dict[str, Change] = {
    **{f"eos {value!r:.20}": _json("config.json", eos_token_id=value)
       for value in (10**6, -1, 1 << 63, 10**30, True, "2", 1.5, [1, 10**9], [[1]], {"a": 1},
                     list(range(100_000)))},
    **{f"generation eos {value!r:.20}": _json("generation_config.json", eos_token_id=value)
       for value in (10**6, -1, True, "2", [1, -5])},
    "bos": _json("config.json", bos_token_id=1 << 40),
    "pad": _json("config.json", pad_token_id=1 << 40),
    **{f"{name} {value}": _json("config.json", **{name: value})
       for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
                    "intermediate_size", "vocab_size")
       for value in (10**9, 1 << 62)},
    "no heads": _json("config.json", num_attention_heads=0),
    "no layers": _json("config.json", num_hidden_layers=0),
    "negative heads": _json("config.json", num_key_value_heads=-1),
    "context": _json("config.json", max_position_embeddings=(1 << 32) - 1),
    "no context": _json("config.json", max_position_embeddings=0),
    **{f"theta {value}": _json("config.json", rope_theta=value)
       for value in (float("nan"), float("inf"), -1.0, 1e300, "x")},
    "epsilon": _json("config.json", rms_norm_eps=float("inf")),
    "scaling factor": _rope(rope_type="linear", factor=1e30),
    "scaling to nothing": _rope(rope_type="linear", factor=float("nan")),
    "yarn without a context": _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=1 << 40),
    "yarn betas": _rope(rope_type="yarn", factor=4.0, beta_fast=0.0, original_max_position_embeddings=64),
    "llama3 factors": _rope(rope_type="llama3", factor=4.0, low_freq_factor=4.0, high_freq_factor=4.0),
    "scaling is a list": _json("config.json", rope_scaling=[1, 2]),
    "family is a list": _json("config.json", model_type=["llama"]),
    "nested config": _text("config.json", _NESTED),
    "nested generation": _text("generation_config.json", _NESTED),
    "config of digits": _text("config.json", '{"model_type": "llama", "hidden_size": ' + "9" * 10_000 + "}"),
    "temperature": _json("generation_config.json", temperature=-1),
    "temperature nan": _json("generation_config.json", temperature=float("nan")),
    "top_k": _json("generation_config.json", top_k=10**18),
    "top_p": _json("generation_config.json", top_p=7.0),
    "penalty": _json("generation_config.json", repetition_penalty=0.0),
    **{f"added id {value!r:.20}": _added_id(value) for value in (1 << 31, (1 << 32) - 1, 10**30, -1, "x", None)},
    **{f"word id {value!r:.20}": _word_id(value) for value in (1 << 31, (1 << 32) - 1, -1, 1.5)},
    "doubling": _normalizer([_replace("a", "aa")] * 40),
    "one long replacement": _normalizer(_replace("a", "b" * 1_000_000)),
    "replacing nothing": _normalizer({"type": "Replace", "pattern": {"Regex": ""}, "content": "b" * 100_000}),
    "long prefix": _normalizer({"type": "Prepend", "prepend": "x" * 10_000_000}),
    "nested normaliser": _text("tokenizer.json", '{"normalizer": ' + _NESTED + "}"),
    "unknown normaliser": _normalizer({"type": "Bomb"}),
    **{f"pattern {pattern}": _words(pattern)
       for pattern in ("(a+)+$", "(?:(?:a|b)*)*c", "(\\s*)*x", "([a-z]+)*!", "(a|aa)+$")},
    "long pattern": _words("|".join(f"{number:08}" for number in range(50_000))),
    "empty lists": _text("tokenizer.json", '{"x": [' + "[]," * 5_000_000 + "[]]}"),
    "long words": _unigram(2000, 4000),
    "long added tokens": _added(1000, 4000),
    "no vocabulary": _tokenizer(lambda content: content.update(model={"type": "BPE"})),
    "long token": _tokenizer(lambda content: content["added_tokens"][-1].update(content="x" * 1_000_000)),
    **{f"header of {size}": _header_bytes(size) for size in ((1 << 63) - 1, 1 << 63, (1 << 64) - 1)},
    "overlap": _header(_overlap),
    "unknown type": _header(lambda header: header["lm_head.weight"].update(dtype="F12")),
    "type is a list": _header(lambda header: header["lm_head.weight"].update(dtype=["F32"])),
    "shape": _header(lambda header: header["lm_head.weight"].update(shape=[1 << 62, 1 << 62])),
    "dimensions": _header(lambda header: header["lm_head.weight"].update(shape=[1] * 100_000)),
    "offsets": _header(lambda header: header["lm_head.weight"].update(data_offsets=[1 << 62, 1 << 63])),
    "description": _header(lambda header: header.update({"lm_head.weight": "x" * 1_000_000})),
    **{f"shard {name}": _index(name)
       for name in ("../../etc/passwd", "/etc/passwd", "..", "missing.safetensors", "a\0b")},
}  # fmt: skip

# Metadata of a GGUF file, by key; None takes it out.
GGUF_CASES: dict[str, dict[str, Any]] = {
    "gguf context": {"llama.context_length": (1 << 32) - 1},
    "gguf eos": {"tokenizer.ggml.eos_token_id": (1 << 32) - 1},
    "gguf eos text": {"tokenizer.ggml.eos_token_id": "2"},
    "gguf eos bool": {"tokenizer.ggml.eos_token_id": True},
    "gguf bos": {"tokenizer.ggml.bos_token_id": 10**6},
    "gguf layers": {"llama.block_count": (1 << 32) - 1},
    "gguf heads": {"llama.attention.head_count": 0},
    "gguf many heads": {"llama.attention.head_count": (1 << 32) - 1},
    "gguf hidden": {"llama.embedding_length": (1 << 32) - 1},
    "gguf vocabulary": {"llama.vocab_size": (1 << 32) - 1},
    "gguf experts": {"llama.expert_count": (1 << 32) - 1, "llama.expert_used_count": 1},
    "gguf theta": {"llama.rope.freq_base": float("inf")},
    "gguf theta 0": {"llama.rope.freq_base": 0.0},
    "gguf scaling": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1e30},
    "gguf temperature": {"general.sampling.temp": -1.0},
    "gguf long token": {"tokenizer.ggml.tokens": "long"},
    "gguf tokens in tokens": {
        "tokenizer.ggml.tokens": [f"{'a' * length}" for length in range(1, 2000)],
        "tokenizer.ggml.scores": [0.0] * 1999,
        "tokenizer.ggml.token_type": [1] * 1999,
    },
    "gguf types": {"tokenizer.ggml.token_type": [1, 2]},
    "gguf scores": {"tokenizer.ggml.scores": [0.0]},
}


def outcomes(good: Path, scratch: Path, gguf_files: list[Path]) -> Iterator[dict[str, Any]]:
    from cumulo.errors import CumuloError
    from cumulo.models.files.load import inspect_model, load_model

    load_model(good)  # what is imported on the way is not the hostile file's
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, held + MEMORY_BYTES))

    def outcome(name: str, path: Path) -> dict[str, Any]:
        begin_s, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            inspect_model(path)
            load_model(path)
            kind, message = "loaded", ""
        except CumuloError as error:
            kind, message = "refused", str(error)
        except BaseException as error:
            kind, message = "failed", f"{type(error).__name__}: {error}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return {"name": name, "kind": kind, "message": message, "seconds": time.perf_counter() - begin_s,
                "grown_mib": grown >> 10}  # fmt: skip

    for number, (name, change) in enumerate(FOLDER_CASES.items()):
        folder = scratch / str(number)
        shutil.copytree(good, folder)
        change(folder)
        yield outcome(name, folder)
        shutil.rmtree(folder)
    for path in gguf_files:
        yield outcome(path.stem, path)


if __name__ == "__main__":
    for line in outcomes(Path(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]]):
        print(json.dumps(line), flush=True)
