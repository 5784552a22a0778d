# ruff: noqa: E501
"""Writes docs/algorithms/, one page for each algorithm, with the present output of its commands:

python docs/draw_collectives.py && python docs/write_algorithms.py
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

from cumulo.collectives.decide.catalog import CollectiveShape, make_schedule
from cumulo.collectives.decide.check import check_collective

FOLDER = Path(__file__).parent / "algorithms"
PICTURES = runpy.run_path(str(Path(__file__).parent / "draw_collectives.py"))["PICTURES"]
_SIZES = (4, 8, 16)
_ELEMENTS = 16 * 15 * 14 * 12

# (collective, algorithm) -> (title, what it does, what it costs, when it is the right one). Symbols: n ranks, S bytes, h the time
# of a hop, B the bandwidth of a rank's links each way, p pieces.
WORDS = {
    ("all_reduce", "ring"): (
        "Ring all-reduce",
        "Every rank sends one chunk to the next rank in each step. After n − 1 steps each rank has the sum of one chunk; n − 1 "
        "further steps pass the sums on.",
        "2(n − 1) steps, 2(n − 1)/n · S sent by each rank, which is the least possible: 2(n − 1)·h + 2(n − 1)/n · S/B.",
        "Large buffers on few ranks. Its latency grows with n.",
    ),
    ("all_reduce", "tree"): (
        "Double binary tree all-reduce",
        "Two binary trees carry half of the buffer each; an inner node of one tree is a leaf of the other, so that all links are "
        "busy. Pieces follow each other up and down the trees (Sanders et al. 2009; NCCL).",
        "About 2·log₂ n hops, and up to 2·S sent by the busiest rank; with p pieces the levels work at the same time.",
        "Middling buffers on many ranks, where a ring's hops cost more than the bytes.",
    ),
    ("all_reduce", "recursive-doubling"): (
        "Recursive doubling all-reduce",
        "In step i a rank exchanges its whole buffer with the rank 2ⁱ away, and both add. Ranks above the last power of two hand "
        "their part to a partner first.",
        "log₂ n steps of the whole buffer: log₂ n · (h + S/B).",
        "Short messages.",
    ),
    ("all_reduce", "halving-doubling"): (
        "Halving-doubling all-reduce (Rabenseifner)",
        "A reduce-scatter whose exchanges halve in each step, then an all-gather whose exchanges double.",
        "2·log₂ n steps with the bytes of a ring: 2·log₂ n · h + 2(n − 1)/n · S/B.",
        "Middling and large buffers on a network without oversubscription: its partners are far apart.",
    ),
    ("all_reduce", "butterfly"): (
        "Butterfly all-reduce",
        "Halving-doubling with the prime factors of n instead of powers of two: one phase for each factor, and no rank is left "
        "over.",
        "2·Σ(f − 1) messages in 2·(number of factors) steps, with the bytes of a ring.",
        "Numbers of ranks that are no power of two.",
    ),
    ("all_reduce", "two-level"): (
        "Two-level all-reduce",
        "Reduce-scatter inside each node, ring all-reduce between the GPUs of one index of all nodes, all-gather inside.",
        "A network card carries 2(k − 1)/k · S/g for k nodes of g GPUs, over 2(k − 1) hops between nodes.",
        "Many nodes with fast links inside.",
    ),
    ("all_reduce", "multi-ring"): (
        "Rings over rails",
        "One ring for each rail. Ring c enters a node at GPU c and passes odd nodes the other way round, so that it changes nodes "
        "between cards of one rail.",
        "2(n − 1) steps; each card carries one ring's share: 2(n − 1)/n · S/g.",
        "Rail-optimised fabrics, large buffers.",
    ),
    ("all_reduce", "one-shot"): (
        "One-shot all-reduce",
        "Every rank sends its whole buffer to all others and adds what it gets, in the order of the ranks: all get the same bits.",
        "1 step, (n − 1)·S sent by each rank: h + (n − 1)·S/B.",
        "The smallest messages inside an NVLink domain, such as those of a decoding step.",
    ),
    ("all_reduce", "two-shot"): (
        "Two-shot all-reduce",
        "Each rank adds its share of all buffers and sends the sum to all.",
        "2 steps with the bytes of a ring: 2h + 2(n − 1)/n · S/B.",
        "Short and middling messages where every rank reaches every other, as through an NVSwitch.",
    ),
    ("all_reduce", "sharp"): (
        "SHARP: all-reduce in switches",
        "A tree whose inner nodes are switches that add. With one switch it is NVLS.",
        "A rank sends S once and receives S once, whatever n is: about 2·depth·h + S/B.",
        "Networks and NVSwitches that can add.",
    ),
    ("all_reduce", "switchml"): (
        "SwitchML: all-reduce in one programmable switch",
        "A pool of slots in the switch; a slot's answer is the permission to use it again. Lost packets are sent again, and two "
        "copies of each slot make sure that nothing is counted twice (Sapio et al. 2021).",
        "A rank sends S once and receives S once, in S/(slots · packet) rounds.",
        "One rack below a programmable switch.",
    ),
    ("all_reduce", "omnireduce"): (
        "OmniReduce: all-reduce of sparse buffers",
        "Only blocks that are not zero are sent to an aggregator, which sends the sums to all ranks (Fei et al. 2021).",
        "With density d on each of n ranks at random, d·S is sent and 1 − (1 − d)ⁿ of the blocks come back.",
        "Gradients of embeddings and other sparse buffers.",
    ),
    ("all_gather", "ring"): (
        "Ring all-gather",
        "Each rank passes on the block that it got last. Blocks may have any size, also none.",
        "n − 1 steps, (n − 1)/n · S sent by each rank.",
        "Large buffers.",
    ),
    ("all_gather", "bruck"): (
        "Bruck's all-gather",
        "In step i a rank sends all blocks that it has to the rank 2ⁱ before it.",
        "⌈log₂ n⌉ steps for any n, with the bytes of a ring.",
        "Short messages, any number of ranks.",
    ),
    ("all_gather", "butterfly"): (
        "Butterfly all-gather",
        "One phase for each prime factor of n: the members of a small group exchange what they have.",
        "As many steps as n has prime factors, with the bytes of a ring.",
        "Middling messages.",
    ),
    ("all_gather", "direct"): (
        "Direct all-gather",
        "Every rank sends its block to all others at once.",
        "1 step of n − 1 messages.",
        "Short messages where every rank reaches every other.",
    ),
    ("reduce_scatter", "ring"): (
        "Ring reduce-scatter",
        "The first half of a ring all-reduce: each chunk passes all ranks and is added to on its way to its owner.",
        "n − 1 steps, (n − 1)/n · S sent by each rank.",
        "Large buffers.",
    ),
    ("reduce_scatter", "butterfly"): (
        "Butterfly reduce-scatter",
        "One phase for each prime factor of n; what is exchanged shrinks by the factor in each.",
        "As many steps as n has prime factors, with the bytes of a ring.",
        "Middling messages.",
    ),
    ("reduce_scatter", "direct"): (
        "Direct reduce-scatter",
        "Every rank sends each other rank its block, which the owner adds in the order of the ranks.",
        "1 step of n − 1 messages, (n − 1)/n · S sent by each rank.",
        "Short messages where every rank reaches every other.",
    ),
    ("broadcast", "chain"): (
        "Chain broadcast",
        "Along a line of ranks, piece after piece. This is NCCL's ring broadcast.",
        "n − 1 + p − 1 steps of S/p.",
        "Large buffers.",
    ),
    ("broadcast", "binomial"): (
        "Binomial broadcast",
        "In each step every rank that has the buffer sends it to one that has not.",
        "⌈log₂ n⌉ steps of the whole buffer.",
        "Short messages.",
    ),
    ("reduce", "chain"): (
        "Chain reduce",
        "Along a line of ranks to the root, piece after piece; each rank adds its own.",
        "n − 1 + p − 1 steps of S/p.",
        "Large buffers.",
    ),
    ("reduce", "binomial"): (
        "Binomial reduce",
        "A binomial broadcast backwards: in each step half of the ranks hand their sum over.",
        "⌈log₂ n⌉ steps of the whole buffer.",
        "Short messages.",
    ),
    ("all_to_all", "pairwise"): (
        "Pairwise all-to-all",
        "In step s each rank sends to the rank s after it, and receives from the rank s before it.",
        "n − 1 steps, (n − 1)/n · S sent by each rank.",
        "Large messages; no receiver is ever sent to by two at once.",
    ),
    ("all_to_all", "direct"): (
        "Direct all-to-all",
        "All messages of the pairwise exchange at once.",
        "1 step of n − 1 messages.",
        "Middling messages, and networks that spread incast well.",
    ),
    ("all_to_all", "bruck"): (
        "Bruck's all-to-all",
        "In step i a rank sends all chunks whose distance has bit i to the rank 2ⁱ after it; chunks pass several ranks.",
        "⌈log₂ n⌉ steps, about log₂ n / 2 · S sent by each rank.",
        "Short messages.",
    ),
    ("all_to_all", "two-level"): (
        "Two-level all-to-all",
        "First over the network to the GPU of the same index, then inside the node, as DeepSeek-V3 does.",
        "n/g − 1 messages leave a card instead of n − g, for nodes of g GPUs.",
        "Experts on many nodes.",
    ),
    ("barrier", "dissemination"): (
        "Dissemination barrier",
        "In step i a rank tells the rank 2ⁱ after it that it has come.",
        "⌈log₂ n⌉ steps of empty messages.",
        "Every barrier.",
    ),
}


def slug(collective: str, algorithm: str) -> str:
    return f"{collective}-{algorithm}".replace("_", "-")


def command(collective: str, algorithm: str) -> str:
    """That shows the picture's schedule, as far as the command can be told it."""
    shape = next(shape for kind, name, shape in PICTURES.values() if (kind, name) == (collective, algorithm))
    options = [f"--ranks {shape.ranks}", f"--elements {shape.elements}"]
    options += [
        f"--{name.replace('_', '-')} {value}"
        for name, value in (
            ("node_size", shape.node_size),
            ("channels", shape.channels),
            ("pieces", shape.pieces),
        )
        if value != 1
    ]
    return f"cumulo collective show {collective} {algorithm} {' '.join(options)}"


def costs(collective: str, algorithm: str) -> str:
    """What the checker counts, for several numbers of ranks."""
    rows = ["| ranks | steps | messages | most sent by a rank, of S |", "|---|---|---|---|"]
    for ranks in _SIZES:
        node = 4 if algorithm in ("two-level", "multi-ring") else 1
        shape = CollectiveShape(ranks, _ELEMENTS, node_size=min(node, ranks // 2) or 1)
        checked = check_collective(make_schedule(collective, algorithm, shape))
        sent = "" if collective == "barrier" else f"{checked.most_sent / _ELEMENTS:.2f}"
        rows.append(f"| {ranks} | {checked.steps} | {checked.messages} | {sent} |")
    return "\n".join(rows)


def page(collective: str, algorithm: str, output: str) -> str:
    title, what, cost, when = WORDS[collective, algorithm]
    picture = next(
        name for name, (kind, other, _) in PICTURES.items() if (kind, other) == (collective, algorithm)
    )
    shown = "\n".join(line.rstrip() for line in output.strip("\n").splitlines())
    return f"""# {title}

After this page you know what the algorithm `{algorithm}` of `{collective}` does, what it costs and when to choose it.

```
{command(collective, algorithm)}
```

```text
{shown}
```

{what}

![{title}](../images/collectives/{picture}.svg)

Time goes down, a column is a rank (or a switch), a solid line is added and a dashed one copied.

## Cost
{cost} Here n is the number of ranks, S the bytes of the buffer, h the time of a hop, B the bandwidth of a rank's links each way.
The checker counts:

{costs(collective, algorithm)}

## When to choose it
{when} `cumulo collective tune {collective} --ranks 64` compares all algorithms by size, and [collectives](../collectives.md) says how
to run, measure and use them in training and serving.
"""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    environment = os.environ | {"COLUMNS": "110", "NO_COLOR": "1"}
    for pair in WORDS:
        words = command(*pair).split()[1:]
        done = subprocess.run(
            [sys.executable, "-m", "cumulo", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        (FOLDER / f"{slug(*pair)}.md").write_text(page(*pair, done.stdout), "utf-8")
