"""Logits to tokens, many draws at once. Called by the runner after the forward pass.

A draw's token depends on its own logits, parameters, seed, sample index and position, and on nothing else in
the batch. The order is: logit bias, penalties, forbidden tokens (end tokens before `min_tokens`), the guide's
mask, then log-probabilities are read off, then temperature, top-k, top-p, min-p, and one random number picks
from what is left by inverting its cumulative distribution in token order.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.sampling.distribution import (
    Ints,
    as_float64,
    as_tensor,
    block_sums,
    compare,
    exponentials,
    most_likely,
    peaks_of,
    pick_tokens,
    take_rows,
    uniform,
)

# Rows are worked on in slices of about this many logits: their intermediate results stay in the processor's
# cache, and a batch of flat distributions, where every token is a candidate, cannot exhaust memory.
SLICE_ELEMENTS = 1 << 20
_NOTHING = np.zeros(0, dtype=np.int64)
# What eight bits of a mask add to their logits: 0 where set, -infinity where not.
_ADDENDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)
# A bias of +infinity means "this token": large enough to win, small enough to stay finite in float32.
_FORCED = 1e30
NO_TOKEN_LEFT = "logit_bias, min_tokens and the guide together leave no token possible"

DRAW_COLUMNS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),  # 0: off
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.uint64),
        ("sample_index", np.int64),
        ("greedy", np.bool_),
        ("logprobs", np.int64),  # alternatives wanted with the drawn token; -1: no log-probabilities
        ("edited", np.bool_),  # has a bias or penalties
    ]
)


class TokenPairs(NamedTuple):
    """Single logits, as two columns; tokens lie in the vocabulary."""

    draws: Ints
    tokens: Ints

    @classmethod
    def joined(cls, groups: Sequence[tuple[int, Sequence[int] | NDArray[np.int32]]]) -> "TokenPairs":
        """From a draw's tokens, and another's."""
        if not groups:
            return cls(_NOTHING, _NOTHING)
        counts = [len(tokens) for _, tokens in groups]
        draws = np.repeat(np.array([draw for draw, _ in groups], dtype=np.int64), counts)
        return cls(draws, np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in groups]))


@dataclass(slots=True)
class LogitEdits:
    """Logits to change before anything else."""

    bias: TokenPairs
    bias_values: NDArray[np.float64]
    seen: TokenPairs  # prompt and output tokens of draws with a repetition penalty
    output: TokenPairs  # output tokens of draws with a presence or frequency penalty
    forbidden: TokenPairs


@dataclass(slots=True)
class TokenMasks:
    """The tokens that guides allow; all others become impossible."""

    draws: Ints  # the guided ones
    bits: NDArray[np.int32]  # [guided draws, vocabulary / 32]: token t is bit t % 32 of word t // 32
    errors: dict[int, str] = field(default_factory=dict)  # by draw: its guide failed

    def allows_others(self, row: int, tokens: Collection[int]) -> bool:
        """Whether anything but these tokens is allowed."""
        words = self.bits[row].view(np.uint32).copy()
        for token in tokens:
            words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        return bool(words.any())


@dataclass(slots=True)
class DrawBatch:
    """What to draw: one entry per draw in every column."""

    logit_rows: Ints  # several draws may share a row of the logits (parallel samples)
    positions: Ints  # of the token to be drawn
    columns: NDArray[np.void]  # DRAW_COLUMNS
    edits: LogitEdits | None = None
    masks: TokenMasks | None = None
    told: dict[int, list[int]] = field(default_factory=dict)  # by draw: tokens told instead of the likeliest


@dataclass(slots=True)
class Drawn:
    tokens: Ints  # 0 where the draw failed
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def draw(logits: Tensor, batch: DrawBatch) -> Drawn:
    """Draw one token per entry of the batch from logits [rows, vocabulary], which may be overwritten."""
    draws = len(batch.logit_rows)
    if draws == 0:
        return Drawn(np.zeros(0, dtype=np.int64))
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if not (draws == logits.shape[0] and np.array_equal(batch.logit_rows, np.arange(draws))):
        logits = logits.index_select(0, as_tensor(batch.logit_rows, logits))
    logits = logits.contiguous()
    peaks, tokens = peaks_of(logits)  # NaN wins every maximum, so a finite peak means a sound row
    errors = {
        int(d): f"the model returned {'NaN' if np.isnan(peaks[d]) else 'infinite'} logits"
        for d in np.flatnonzero(~np.isfinite(peaks))
    }
    edited = _NOTHING
    if batch.edits is not None:
        edited = apply_edits(logits, batch.columns, batch.edits)
    if batch.masks is not None:
        apply_masks(logits, batch.masks)
        errors.update(batch.masks.errors)
        edited = np.union1d(edited, batch.masks.draws)
    edited = edited[np.isfinite(peaks[edited])]
    if len(edited):
        peaks[edited], tokens[edited] = peaks_of(take_rows(logits, edited))
        for d in edited[~np.isfinite(peaks[edited])]:
            errors[int(d)] = NO_TOKEN_LEFT
    failed = np.zeros(draws, dtype=bool)
    failed[list(errors)] = True
    columns = batch.columns
    drawn = Drawn(tokens, errors=errors)
    step = max(1, SLICE_ELEMENTS // logits.shape[-1])
    for first in range(0, draws, step):
        part = np.arange(first, min(first + step, draws))
        sampled = part[~columns["greedy"][part] & ~failed[part]]
        if len(sampled):
            chosen = columns[sampled]
            numbers = uniform(chosen["seed"], chosen["sample_index"], batch.positions[sampled])
            tokens[sampled] = pick_tokens(take_rows(logits, sampled), peaks[sampled], chosen, numbers)
        wanted = part[(columns["logprobs"][part] >= 0) & ~failed[part]]
        if len(wanted):
            entries = token_logprobs(take_rows(logits, wanted), tokens[wanted], columns["logprobs"][wanted])
            drawn.logprobs.update(zip(wanted.tolist(), entries, strict=True))
    for d in batch.told.keys() & drawn.logprobs.keys():
        entry = drawn.logprobs[d]
        ids = list(dict.fromkeys((entry.token, *batch.told[d])))
        values = as_float64(logits[d, ids])
        entry.top[:] = zip(ids, (values - values[0] + entry.logprob).tolist(), strict=True)
    tokens[failed] = 0
    return drawn


def token_logprobs(logits: Tensor, tokens: Ints, alternatives: Ints) -> list[TokenLogprobs]:
    """Natural log-probability and rank of one token per row, and its row's most likely alternatives."""
    peaks, _ = peaks_of(logits)
    sums = block_sums(exponentials(logits, peaks, np.ones(len(tokens))))
    normalisers = (peaks + np.log(sums.sum(axis=1))).tolist()
    chosen = as_float64(logits.gather(1, as_tensor(tokens, logits)[:, None]))[:, 0]
    logprobs = chosen - normalisers
    ranks = [1 + int(np.count_nonzero(likelier)) for likelier in compare(operator.gt, logits, chosen)]
    top: list[list[tuple[int, float]]] = [[] for _ in tokens]
    counts = np.minimum(alternatives, logits.shape[-1])
    rows = np.flatnonzero(counts > 0)
    if len(rows):
        for row, ids, values in zip(rows, *most_likely(take_rows(logits, rows), counts[rows]), strict=True):
            top[row] = [(token, value - normalisers[row]) for token, value in zip(ids, values, strict=True)]
    return [
        TokenLogprobs(token, logprob, rank, alternatives_of_token)
        for token, logprob, rank, alternatives_of_token in zip(
            tokens.tolist(), logprobs.tolist(), ranks, top, strict=True
        )
    ]


# -- edits ------------------------------------------------------------------------------------------------
def apply_edits(logits: Tensor, columns: NDArray[np.void], edits: LogitEdits) -> Ints:
    """Change the logits in place; return the draws that were changed."""
    vocabulary = logits.shape[-1]
    flat = logits.view(-1)

    def index(pairs: TokenPairs) -> Ints:
        return pairs.draws * vocabulary + pairs.tokens

    if len(edits.bias.draws):
        where = as_tensor(index(edits.bias), logits)
        values = np.minimum(edits.bias_values, _FORCED)  # -infinity stays: never this token
        flat[where] += torch.from_numpy(values).to(logits)
    if len(edits.seen.draws):
        # Keskar et al. 2019 (CTRL), section 4.1, as used since: positive logits are divided, negative ones
        # multiplied. Writing the same value for each repetition of a token makes duplicates harmless.
        where = as_tensor(index(edits.seen), logits)
        penalty = torch.from_numpy(columns["repetition_penalty"][edits.seen.draws]).to(logits)
        seen = flat[where]
        flat[where] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if len(edits.output.draws):
        pairs, counts = np.unique(index(edits.output), return_counts=True)
        draws = pairs // vocabulary
        minus = columns["frequency_penalty"][draws] * counts + columns["presence_penalty"][draws]
        flat[as_tensor(pairs, logits)] -= torch.from_numpy(minus).to(logits)
    if len(edits.forbidden.draws):
        flat[as_tensor(index(edits.forbidden), logits)] = -torch.inf
    changed = (edits.bias, edits.seen, edits.output, edits.forbidden)
    return np.unique(np.concatenate([pairs.draws for pairs in changed]))


def apply_masks(logits: Tensor, masks: TokenMasks) -> None:
    """-infinity for every token a guide forbids, in place."""
    vocabulary = logits.shape[-1]
    if logits.device.type == "cpu":  # three times as fast as unpacking the bits and a masked fill
        array = logits.numpy()
        for octets, draw in zip(masks.bits.view(np.uint8), masks.draws.tolist(), strict=True):
            array[draw] += np.take(_ADDENDS, octets, axis=0).reshape(-1)[:vocabulary]
        return
    rows = as_tensor(masks.draws, logits)
    allowed = unpack_bits(torch.from_numpy(masks.bits).to(logits.device), vocabulary)
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


def unpack_bits(words: Tensor, count: int) -> Tensor:
    """The first `count` bits of each row of int32 words, lowest first, unpacked where the words are: a mask
    crosses to the device as bits."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :count]
