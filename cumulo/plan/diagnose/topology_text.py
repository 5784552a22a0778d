"""The matrix of `nvidia-smi topo -m` (or rocm-smi) in a text: which GPUs have NVLink, and which are far from all
cards. `diagnose` calls it. `cumulo topology` reads the whole of it."""

from dataclasses import dataclass

from cumulo.base import quick_re as re

_PATHS = ("X", "SYS", "NODE", "PHB", "PXB", "PIX", "XGMI")
_COLUMN = re.compile(r"^(?:GPU\d+|NIC\d+|mlx5_\w+|bnxt_re\d+|rdma\w*\d+|ib\d+)$")


@dataclass(frozen=True, slots=True)
class TopologyMatrix:
    nvlink: bool | None  # between GPUs; None: there are no columns of GPUs
    far: tuple[str, ...]  # GPUs that reach every card only across sockets
    near: tuple[str, ...]  # GPUs that have a card nearer


def topology_matrix(text: str) -> TopologyMatrix | None:
    lines = text.splitlines()
    for at, line in enumerate(lines):
        columns = [word for word in line.split() if _COLUMN.match(word)]
        first = line.split()[:1]
        if len(columns) < 2 or not first or not _COLUMN.match(first[0]):
            continue
        rows = {}
        for row in lines[at + 1 : at + 40]:
            words = row.split()
            if words and re.match(r"^GPU\d+$", words[0]) and len(words) > 1 and _is_path(words[1]):
                rows[words[0]] = dict(zip(columns, words[1:], strict=False))
        if rows:
            return _matrix(rows)
    return None


def _is_path(word: str) -> bool:
    return word in _PATHS or bool(re.match(r"^NV\d+$", word))


def _matrix(rows: dict[str, dict[str, str]]) -> TopologyMatrix:
    pairs = [
        path for row in rows.values() for name, path in row.items() if name.startswith("GPU") and path != "X"
    ]
    cards = {
        gpu: [path for name, path in row.items() if not name.startswith("GPU") and _is_path(path)]
        for gpu, row in rows.items()
    }
    far = tuple(gpu for gpu, paths in cards.items() if paths and all(path == "SYS" for path in paths))
    near = tuple(gpu for gpu, paths in cards.items() if paths and gpu not in far)
    nvlink = any(path.startswith("NV") or path == "XGMI" for path in pairs) if pairs else None
    return TopologyMatrix(nvlink, far, near)
