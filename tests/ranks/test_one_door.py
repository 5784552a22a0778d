"""torch.distributed is used through `cumulo.ranks`, and nowhere else in the package."""

import ast
from pathlib import Path

import cumulo

ROOT = Path(cumulo.__file__).parent
# Libraries of their own: each may be used where its one purpose is.
LIBRARIES = {
    "train/optimizer/fsdp.py": (
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed.device_mesh",
    ),
    # The players of schedules are what `ranks` uses itself.
    **{
        f"collectives/play/{name}.py": ("torch.distributed",)
        for name in ("groups", "messages", "shared_memory", "sockets")
    },
    "checkpoint/play/boxes.py": ("torch.distributed.checkpoint",),
}


def imported(file: Path) -> list[str]:
    text = file.read_text("utf-8")
    if "distributed" not in text:  # most files: parsing all takes seconds
        return []
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.append(f"{node.value.id}.{node.attr}")
    return [name for name in names if name.startswith("torch.distributed")]


def test_only_ranks_import_torch_distributed() -> None:
    wrong = [
        f"{path}: {name}"
        for file in sorted(ROOT.rglob("*.py"))
        if not (path := file.relative_to(ROOT).as_posix()).startswith("ranks/")
        for name in imported(file)
        if not name.startswith(LIBRARIES.get(path, ("nothing",)))
    ]
    assert not wrong
