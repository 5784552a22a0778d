"""The built-in model with fewer layers and tokens: with its own names, types, template and merges.

A byte-level BPE learns its tokens one merge after the other, so its first tokens and merges are a vocabulary, too.
"""

from pathlib import Path

import gguf

from cumulo.models.files.gguf_file import open_gguf
from cumulo.models.files.hub import built_in_model


def cut_smollm(path: Path, layers: int = 2, tokens: int = 4096) -> Path:
    """Writes the first `layers` layers and `tokens` tokens of the built-in model to `path`, a .gguf file."""
    whole = open_gguf(built_in_model())
    pieces = whole.metadata["tokenizer.ggml.tokens"]
    known = set(pieces[:tokens])
    changes = {
        "llama.block_count": layers,
        "llama.vocab_size": tokens,
        "tokenizer.ggml.tokens": pieces[:tokens],
        "tokenizer.ggml.token_type": whole.metadata["tokenizer.ggml.token_type"][:tokens],
        "tokenizer.ggml.merges": [
            merge for merge in whole.metadata["tokenizer.ggml.merges"] if merge.replace(" ", "") in known
        ],
    }
    writer = gguf.GGUFWriter(path, whole.metadata["general.architecture"])
    for key, value in (whole.metadata | changes).items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in whole.tensors.items():
        if name.startswith("blk.") and int(name.split(".")[1]) >= layers:
            continue
        rows = tensor.raw[:tokens] if name == "token_embd.weight" else tensor.raw
        if tensor.type_name == "F32":
            rows = rows.view("float32").reshape(tensor.shape)
        writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[tensor.type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
