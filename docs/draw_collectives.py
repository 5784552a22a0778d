"""Draws the pictures of docs/collectives.md and docs/algorithms.md anew: python docs/draw_collectives.py"""

from pathlib import Path

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.draw import collective_svg

FOLDER = Path(__file__).parent / "images" / "collectives"
PICTURES = {
    "ring": ("all_reduce", "ring", CollectiveShape(4, 64)),
    "tree": ("all_reduce", "tree", CollectiveShape(6, 64, pieces=2)),
    "recursive-doubling": ("all_reduce", "recursive-doubling", CollectiveShape(6, 64)),
    "halving-doubling": ("all_reduce", "halving-doubling", CollectiveShape(8, 64)),
    "butterfly": ("all_reduce", "butterfly", CollectiveShape(6, 60)),
    "two-level": ("all_reduce", "two-level", CollectiveShape(6, 60, node_size=3)),
    "multi-ring": ("all_reduce", "multi-ring", CollectiveShape(4, 64, node_size=2)),
    "one-shot": ("all_reduce", "one-shot", CollectiveShape(4, 64)),
    "two-shot": ("all_reduce", "two-shot", CollectiveShape(4, 64)),
    "sharp": ("all_reduce", "sharp", CollectiveShape(4, 64, pieces=2, radix=2)),
    "ring-all-gather": ("all_gather", "ring", CollectiveShape(4, 64)),
    "butterfly-all-gather": ("all_gather", "butterfly", CollectiveShape(6, 60)),
    "direct-all-gather": ("all_gather", "direct", CollectiveShape(4, 64)),
    "ring-reduce-scatter": ("reduce_scatter", "ring", CollectiveShape(4, 64)),
    "butterfly-reduce-scatter": ("reduce_scatter", "butterfly", CollectiveShape(6, 60)),
    "direct-reduce-scatter": ("reduce_scatter", "direct", CollectiveShape(4, 64)),
    "chain-reduce": ("reduce", "chain", CollectiveShape(4, 64, pieces=3)),
    "binomial-reduce": ("reduce", "binomial", CollectiveShape(6, 64)),
    "direct": ("all_to_all", "direct", CollectiveShape(4, 64)),
    "bruck-all-gather": ("all_gather", "bruck", CollectiveShape(5, 50)),
    "chain": ("broadcast", "chain", CollectiveShape(4, 64, pieces=3)),
    "binomial": ("broadcast", "binomial", CollectiveShape(6, 64)),
    "pairwise": ("all_to_all", "pairwise", CollectiveShape(4, 64)),
    "bruck": ("all_to_all", "bruck", CollectiveShape(4, 64)),
    "two-level-all-to-all": ("all_to_all", "two-level", CollectiveShape(4, 64, node_size=2)),
    "dissemination": ("barrier", "dissemination", CollectiveShape(5, 0)),
}


def drawn(name: str) -> str:
    return collective_svg(make_schedule(*PICTURES[name])) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for picture in PICTURES:
        (FOLDER / f"{picture}.svg").write_text(drawn(picture), "utf-8")
