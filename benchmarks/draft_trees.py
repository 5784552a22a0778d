"""How many tokens a round keeps with chains and with trees of drafts: a head's proposals at every place of real
greedy answers, computed once on a CPU, and rounds replayed over them. Says nothing about time: that a GPU must say.

    python benchmarks/draft_trees.py --head FOLDER --prompts 12 --tokens 128
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent))

from cumulo.bench.speculate import chat_prompts
from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.params import SamplingParams
from cumulo.engine.llm import LLM
from cumulo.models.decoder import Decoder
from cumulo.models.files.load import load_model
from cumulo.models.heads.eagle import EagleHead
from cumulo.models.heads.files import load_eagle
from cumulo.train.head.states import hidden_states

EACH = 4  # proposals behind each node, as the GPU's kernels have them
Way = tuple[int, ...]  # ranks of the proposals on the way to a node
Proposed = dict[
    Way, tuple[NDArray[np.int64], NDArray[np.float32]]
]  # tokens and chances [places, EACH] behind it
# The ways behind which proposals are computed: all that a tree of width 2 may follow but the rarest.
FOLLOWED: list[Way] = [(), (0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (1, 1), (0, 0, 0), (0, 0, 1),
                       (0, 1, 0), (1, 0, 0)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="as in `cumulo serve`; default: the built-in one")
    parser.add_argument("--head", required=True, type=Path, help="the folder of its head")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    chosen = parser.parse_args()
    config = EngineConfig(device="cpu", threads=1, kv_memory_gib=1.0, max_context=1024, prefix_cache=False)
    with LLM(chosen.model, config=config) as llm:
        prompts = [
            list(llm.tokenizer.render_chat([{"role": "user", "content": text}])[1])
            for text in chat_prompts(chosen.prompts)
        ]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=chosen.tokens))
    decoder = load_model(chosen.model, keep_quantised=False, with_tokenizer=False).decoder
    head = load_eagle(chosen.head, decoder.spec, pack=False)
    head.rotary.serve(1024)
    answers = [output.samples[0].token_ids for output in outputs]
    found = [
        (proposals(decoder, head, prompt, answer), answer[1:])
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(answer) > 2
    ]
    places = sum(len(proposed[()][0]) for proposed, _ in found)
    right = sum((proposed[()][0] == np.array(truth)[:, None]).sum(axis=0) for proposed, truth in found)
    print(f"{places} places; right by rank: {', '.join(f'{hits / places:.1%}' for hits in right)}")
    for drafts in (1, 3, 4):
        chain: list[Way] = [(0,) * depth for depth in range(1, drafts + 1)]
        print(f"chain of {drafts}: {kept(found, lambda *_, ways=chain: ways):.2f} tokens a round")
    for drafts, levels, width in ((3, 2, 2), (7, 2, 2), (7, 3, 2), (7, 3, 3), (7, 4, 2)):
        tokens = kept(found, lambda one, place, d=drafts, n=levels, w=width: grown(one, place, n, d, w))
        print(f"tree of {drafts}, {levels} levels, {width} followed on each: {tokens:.2f} tokens a round")


@torch.inference_mode()
def proposals(decoder: Decoder, head: EagleHead, prompt: list[int], answer: list[int]) -> Proposed:
    """Behind every known token of the answer but the last."""
    tokens, spec = torch.tensor(prompt + answer), head.spec
    count, group, scale = len(tokens), spec.heads // spec.kv_heads, spec.head_dim**-0.5
    seen, _ = hidden_states(decoder, tokens[None])
    stream = head.fc(seen[0].float())[:-1]  # at a place with the token behind it
    query, key, value = head.heads(stream, decoder.embed.rows(tokens[1:]).float())
    rotation = head.rotary.rotation_at(torch.arange(count - 1))
    query, key = rotation.apply(query), rotation.apply(key)
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    at = torch.arange(len(prompt) - 1, count - 2)
    hidden_from = (torch.arange(count - 1)[None] > at[:, None])[:, None]
    outputs: dict[Way, torch.Tensor] = {}
    own: dict[Way, list[tuple[torch.Tensor, torch.Tensor]]] = {(): []}
    found: Proposed = {}
    for way in FOLLOWED:
        if way:
            before = outputs[way[:-1]]
            behind = torch.from_numpy(found[way[:-1]][0][:, way[-1]])
            asking, new_key, new_value = head.heads(before, decoder.embed.rows(behind).float())
            turn = head.rotary.rotation_at(at + len(way))
            asking, new_key = turn.apply(asking), turn.apply(new_key)
            pair = new_key.repeat_interleave(group, 1), new_value.repeat_interleave(group, 1)
            own[way] = [*own[way[:-1]], pair]
        else:
            before, asking = stream[at], query[at]
        scores = torch.einsum("ahd,jhd->ahj", asking, keys).masked_fill(hidden_from, float("-inf"))
        more = [(asking * one).sum(-1, keepdim=True) for one, _ in own[way]]
        weights = (torch.cat([scores, *more], -1) * scale).softmax(-1)
        mixed = torch.einsum("ahj,jhd->ahd", weights[..., : count - 1], values)
        for index, (_, one) in enumerate(own[way]):
            mixed = mixed + weights[..., count - 1 + index, None] * one
        outputs[way] = head.rest(before, mixed.flatten(1))
        chances, chosen = head.logits(outputs[way]).softmax(-1).topk(EACH, -1)
        found[way] = head.token_of[chosen].numpy(), chances.numpy()
    return found


def grown(proposed: Proposed, place: int, levels: int, drafts: int, width: int) -> list[Way]:
    """The likeliest ways of a tree that is grown behind the `width` likeliest nodes of each level."""
    chances: dict[Way, float] = {(): 1.0}
    followed: list[Way] = [()]
    for _ in range(levels):
        level = {
            (*way, rank): chances[way] * float(proposed[way][1][place, rank])
            for way in followed
            if way in proposed
            for rank in range(EACH)
        }
        chances |= level
        followed = sorted(level, key=lambda way: -level[way])[:width]
    return sorted((way for way in chances if way), key=lambda way: -chances[way])[:drafts]


def kept(found: list[tuple[Proposed, list[int]]], drafted: Callable[[Proposed, int], list[Way]]) -> float:
    """Tokens of a round, on average, where each begins behind what the one before has kept."""
    tokens = rounds = 0
    for proposed, truth in found:
        place = 0
        while place < len(truth):
            ways, way, right = set(drafted(proposed, place)), (), 0
            while way in proposed and place + right < len(truth):
                named = proposed[way][0][place].tolist()
                if truth[place + right] not in named:
                    break
                longer = (*way, named.index(truth[place + right]))
                if longer not in ways:
                    break
                way, right = longer, right + 1
            tokens, rounds, place = tokens + right + 1, rounds + 1, place + right + 1
    return tokens / rounds


if __name__ == "__main__":
    main()
