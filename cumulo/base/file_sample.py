"""A digest of a large file from pieces of it: whether two model files are the same, without reading all of them.
Asked by KV tiers, by the fleet's identity, and by engines and ranks of several hosts that must be of one model."""

from hashlib import blake2b
from pathlib import Path

_PIECES, _PIECE_BYTES = 1024, 1 << 12
_ENDS_BYTES = 1 << 16
_WEIGHTS = (".safetensors", ".gguf", ".bin")


def sampled_digest(path: Path) -> bytes:
    """Of the file's size, its beginning and end, and 1,024 pieces between. What changes more than a thousandth of
    a file in a row changes it: a fine-tune of a single layer does, whatever else it left alone."""
    size = path.stat().st_size
    state = blake2b(str(size).encode(), digest_size=16, person=b"cumulo-file")
    step = max(_PIECE_BYTES, size // _PIECES)
    with path.open("rb") as file:
        state.update(file.read(_ENDS_BYTES))
        for start in range(0, size, step):
            file.seek(start)
            state.update(file.read(_PIECE_BYTES))
        file.seek(max(0, size - _ENDS_BYTES))
        state.update(file.read(_ENDS_BYTES))
    return state.digest()


def weights_digest(path: Path) -> str:
    """Of a file with weights, or of a folder's and of its config.json: copies on other hosts have the same."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    state = blake2b(digest_size=6, person=b"cumulo-weights")
    for file in files:
        if file.suffix in _WEIGHTS or file.name == "config.json":
            state.update(sampled_digest(file))
    return state.hexdigest()
