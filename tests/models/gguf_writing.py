"""Small GGUF files for tests, written with the reference writer of the `gguf` package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, str]] | None = None,
    alignment: int | None = None,
) -> Path:
    """`tensors` maps a name to (float32 values, name of the type to store them as)."""
    metadata = dict(metadata)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", "llama"))
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    for name, (values, type_name) in (tensors or {}).items():
        kind = gguf.GGMLQuantizationType[type_name]
        values = np.ascontiguousarray(values, dtype=np.float32)
        writer.add_tensor(name, quantised(values, type_name), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(values: np.ndarray, type_name: str) -> np.ndarray:
    """Values in a storage type; those that the package cannot write become random well-formed blocks."""
    kind = gguf.GGMLQuantizationType[type_name]
    starts = {  # of a block's float16 scales
        "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
        "IQ4_XS": (0,),
    }  # fmt: skip
    if type_name not in starts:
        return gguf.quantize(values, kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(values.size).integers(
        0, 256, (values.size // block, block_bytes), dtype=np.uint8
    )
    for start in starts[type_name]:  # float16 scales of a sensible size instead of random bits
        scale = np.float16(0.01 / (128 if type_name.startswith("IQ") else 32 if type_name == "Q6_K" else 16))
        blocks[:, start : start + 2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.reshape(*values.shape[:-1], values.shape[-1] // block * block_bytes)
