"""Answers as a head is trained on them: the places that count, the hidden states next to them, and batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulo.base.machine import available_memory
from cumulo.models.decoder import Decoder
from cumulo.train.head.answers import OwnAnswer
from cumulo.train.head.writer import hidden_states

_AT_ONCE = 16_384  # places whose states are computed at the same time
_SHARE_OF_MEMORY = 0.75  # of what is free, for states
_SORTED = 64  # batches among which examples are put together by length, so that little is filled up


@dataclass(frozen=True, slots=True)
class KeptStates:
    """A model's hidden states that are kept with an answer."""

    stream: Tensor  # [n, features]
    teacher: Tensor  # [n, hidden]: the last ones, normed, which say what the model expects behind them


@dataclass(frozen=True, slots=True)
class Example:
    length: int  # n: places 0 .. n - 1 are seen
    tokens: Tensor  # [n + depth + 1]: of places 0 ..
    first: int  # places before it lie in the prompt: not trained
    kept: KeptStates | None = None  # None: computed with each batch


@dataclass(frozen=True, slots=True)
class HeadBatch:
    """Examples side by side, filled up at their ends, which nothing before sees."""

    stream: Tensor  # [examples, n, features]
    tokens: Tensor  # [examples, n + depth + 1]
    teacher: Tensor  # [taught, hidden]: the model's last states where it is asked what it expects
    rows: Tensor  # [places]: of the places that are trained, whose example,
    places: Tensor  # ... where,
    taught: Tensor  # ... and which of `teacher` tells its first proposal; those after it the next ones
    depth: int  # proposals behind each other


def examples_of(answers: Sequence[OwnAnswer], depth: int, device: torch.device | str) -> list[Example]:
    """Examples that are long enough to be learnt from."""
    answers = [one for one in answers if len(one.tokens) > one.prompt_length + 2 * depth]
    if not answers:
        return []
    flat = torch.from_numpy(np.concatenate([one.tokens for one in answers]).astype(np.int64)).to(device)
    split = flat.split([len(one.tokens) for one in answers])
    # At place p the token p + 2 is proposed: the first that is an answer's follows the prompt.
    made = [
        Example(len(tokens) - depth - 1, tokens, max(0, one.prompt_length - 2))
        for one, tokens in zip(answers, split, strict=True)
    ]
    return [one for one in made if one.length > one.first + depth + 1]


def with_states(examples: list[Example], decoder: Decoder) -> list[Example]:
    """The model's states are kept as far as memory allows, so that they are not computed in every epoch."""
    features, size = 4 * decoder.spec.hidden, decoder.final_norm.weight.element_size()
    room = int(_SHARE_OF_MEMORY * _free_bytes(decoder)) // (features * size)
    done, order = list(examples), sorted(range(len(examples)), key=lambda index: examples[index].length)
    first = 0
    while first < len(order):
        longest, last = 0, first
        while last < len(order) and (last - first + 1) * examples[order[last]].length <= _AT_ONCE:
            last += 1
        some = order[first : max(last, first + 1)]
        first += len(some)
        lengths = [examples[index].length for index in some]
        longest, room = max(lengths), room - sum(lengths)
        if room < 0:
            break
        tokens = torch.nn.utils.rnn.pad_sequence(
            [examples[i].tokens[:longest] for i in some], batch_first=True
        )
        stream, teacher = hidden_states(decoder, tokens[:, :longest])
        inside = (
            torch.arange(longest, device=tokens.device) < torch.tensor(lengths, device=tokens.device)[:, None]
        )
        streams, teachers = stream[inside].split(lengths), teacher[inside].split(lengths)
        for index, one, other in zip(some, streams, teachers, strict=True):
            done[index] = replace(examples[index], kept=KeptStates(one, other))
    return done


def _free_bytes(decoder: Decoder) -> int:
    if not decoder.final_norm.weight.is_cuda:
        return available_memory()
    torch.cuda.empty_cache()  # what writing the answers took is free for others, too
    return torch.cuda.mem_get_info()[0]


def together(decoder: Decoder, examples: Sequence[Example], depth: int) -> HeadBatch:
    def padded(tensors: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    # Places behind which the model's probabilities are known as far as proposals go.
    trained = [max(0, one.length - depth - one.first) for one in examples]
    firsts = np.array([one.first for one in examples])
    whose = np.repeat(np.arange(len(examples)), trained)
    within = _counted(trained)
    taught_counts = [count + depth - 1 if count else 0 for count in trained]
    taught_of = np.repeat(np.arange(len(examples)), taught_counts)
    taught_at = firsts[taught_of] + 1 + _counted(taught_counts)
    begins = np.cumsum(taught_counts) - taught_counts
    device = examples[0].tokens.device
    numbers = np.concatenate((whose, firsts[whose] + within, begins[whose] + within, taught_of, taught_at))
    sizes = (len(whose),) * 3 + (len(taught_of),) * 2
    rows, places, taught, taught_rows, taught_places = _sent(torch.from_numpy(numbers), device).split(sizes)
    longest = max(one.length for one in examples)
    tokens = padded([one.tokens[: longest + depth + 1] for one in examples])
    tokens = F.pad(tokens, (0, longest + depth + 1 - tokens.shape[1]))
    kept = [one.kept for one in examples if one.kept is not None]
    if len(kept) == len(examples):
        stream, teacher = padded([one.stream for one in kept]), padded([one.teacher for one in kept])
    else:
        stream, teacher = hidden_states(decoder, tokens[:, :longest])
    return HeadBatch(stream, tokens, teacher[taught_rows, taught_places], rows, places, taught, depth)


def _sent(here: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for what it computes: only page-locked memory is copied so."""
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)


def _counted(counts: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """0, 1, ... anew for every count."""
    total = np.array(counts, dtype=np.int64)
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = np.arange(total.sum()) - np.repeat(
        np.cumsum(total) - total, total
    )
    return found


def batches(examples: Sequence[Example], batch_tokens: int, seed: int) -> Iterator[list[Example]]:
    """Without end, each example once in every round; a batch has about so many places, filled up ones included."""
    rng = np.random.default_rng(seed)
    mean = sum(one.length for one in examples) / len(examples)
    window = max(1, round(_SORTED * batch_tokens / mean))
    while True:
        order = rng.permutation(len(examples))
        for first in range(0, len(order), window):
            some = sorted(order[first : first + window], key=lambda index: examples[index].length)
            made: list[list[Example]] = [[]]
            for index in some:
                if made[-1] and (len(made[-1]) + 1) * examples[index].length > batch_tokens:
                    made.append([])
                made[-1].append(examples[index])
            yield from (made[index] for index in rng.permutation(len(made)))
