"""SlicedSampler: draws from logits of which every rank has some columns, without gathering them. A rank's runner
calls it in the place of the plain sampler, and every rank comes to the same tokens.

What ranks exchange are a few numbers per draw: each slice's largest logit and its token, sums of exponentials,
and for top-k, top-p and min-p the candidates, a superset of what the cuts keep. The cuts themselves are the
plain sampler's, on the candidates of all slices in token order. Only a top-p draw from so flat a distribution
that its candidates would be most of the vocabulary gathers its whole row.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cumulo.engine.decide.plan import TokenLogprobs
from cumulo.engine.sampling.distribution import (
    ROUNDING,
    as_float64,
    as_tensor,
    at_least,
    block_sums,
    exponentials,
    most_likely,
    peaks_of,
    pick_from_all,
    pick_tokens,
    take_rows,
    top_k_bounds,
    uniform,
    values_at,
)
from cumulo.engine.sampling.sampler import NO_TOKEN_LEFT, DrawBatch, Drawn, apply_edits, apply_masks

Floats = NDArray[np.float64]
Exchange = Callable[[Floats], Floats]  # a slice's array -> all slices', [slices, ...]


class SlicedSampler:
    def __init__(self, index: int, tokens: range, vocabulary: int, exchange: Exchange) -> None:
        """`tokens`: those whose logits are here, slice number `index` of `vocabulary` tokens in all."""
        self.index, self.tokens, self.vocabulary, self._exchange = index, tokens, vocabulary, exchange

    def vocabulary_of(self, logits: Tensor) -> int:
        return self.vocabulary

    def draw(self, logits: Tensor, batch: DrawBatch) -> Drawn:
        """As the plain sampler's `draw`, from this rank's columns; all ranks call it with the same batch."""
        columns = batch.columns
        if len(columns) == 0:
            return Drawn(np.zeros(0, dtype=np.int64))
        logits = _floating(logits).index_select(0, as_tensor(batch.logit_rows, logits))
        unedited, _ = peaks_of(logits)
        if batch.edits is not None:
            apply_edits(logits, columns, batch.edits.within(self.tokens))
        if batch.masks is not None:
            apply_masks(logits, batch.masks, self.tokens.start)
        local, best = peaks_of(logits)
        greedy = columns["greedy"].all()
        hot = np.zeros(len(columns)) if greedy else _masses(logits, local, columns["temperature"])
        offers = self._exchange(np.stack((unedited, local, best + self.tokens.start, hot), axis=1))
        peaks = offers[:, :, 1].max(axis=0)
        owner = offers[:, :, 1].argmax(axis=0)  # of equals the first, which has the lower tokens
        tokens = offers[owner, np.arange(len(columns)), 2].astype(np.int64)
        errors = _errors(offers[:, :, 0].max(axis=0), peaks, batch)
        failed = np.zeros(len(columns), dtype=bool)
        failed[list(errors)] = True
        sampled = np.flatnonzero(~columns["greedy"] & ~failed)
        if len(sampled):
            chosen = columns[sampled]
            numbers = uniform(chosen["seed"], chosen["sample_index"], batch.positions[sampled])
            tokens[sampled] = self._pick(
                take_rows(logits, sampled), peaks[sampled], offers[:, sampled], chosen, numbers
            )
        drawn = Drawn(tokens, errors=errors)
        wanted = np.flatnonzero((columns["logprobs"] >= 0) & ~failed)
        if len(wanted):
            entries = self.token_logprobs(
                take_rows(logits, wanted), tokens[wanted], columns["logprobs"][wanted]
            )
            drawn.logprobs.update(zip(wanted.tolist(), entries, strict=True))
        tokens[failed] = 0
        return drawn

    # -- picking --------------------------------------------------------------------------------------
    def _pick(
        self, logits: Tensor, peaks: Floats, offers: Floats, columns: NDArray[np.void], numbers: Floats
    ) -> NDArray[np.int64]:
        local = offers[:, :, 1]
        # [slices, draws]; a slice without a possible token has a peak of -infinity, and no mass.
        masses = offers[:, :, 3] * np.exp((local - peaks) / columns["temperature"])
        cut = (columns["top_k"] > 0) & (columns["top_k"] < self.vocabulary)
        cut |= (columns["top_p"] < 1) | (columns["min_p"] > 0)
        tokens = np.empty(len(columns), dtype=np.int64)
        if not cut.all():
            rows = np.flatnonzero(~cut)
            temperatures = columns["temperature"][rows]
            tokens[rows] = self._pick_from_all(
                take_rows(logits, rows), local[self.index, rows], masses[:, rows], temperatures, numbers[rows]
            )
        if cut.any():
            rows = np.flatnonzero(cut)
            totals = masses.sum(axis=0)[rows]
            tokens[rows] = self._pick_candidates(
                take_rows(logits, rows), peaks[rows], totals, columns[rows], numbers[rows]
            )
        return tokens

    def _pick_from_all(
        self, logits: Tensor, local: Floats, masses: Floats, temperatures: Floats, numbers: Floats
    ) -> NDArray[np.int64]:
        """First the slice, by the slices' masses, then the token in it, which its rank finds and tells."""
        cumulative = np.cumsum(masses, axis=0)
        targets = numbers * cumulative[-1]
        # Rounding can put the target on the total: then the last slice with weight.
        last = (cumulative < cumulative[-1]).sum(axis=0)
        owner = np.minimum((cumulative <= targets).sum(axis=0), last)
        found = np.full((len(targets), 1), -1.0)
        mine = np.flatnonzero(owner == self.index)
        if len(mine):
            held = masses[self.index, mine]
            within = (targets[mine] - (cumulative[self.index, mine] - held)) / held
            weights = exponentials(take_rows(logits, mine), local[mine], temperatures[mine])
            found[mine, 0] = pick_from_all(weights, np.clip(within, 0.0, 1.0)) + self.tokens.start
        picked: NDArray[np.int64] = self._exchange(found)[:, :, 0].max(axis=0).astype(np.int64)
        return picked

    def _pick_candidates(
        self, logits: Tensor, peaks: Floats, totals: Floats, columns: NDArray[np.void], numbers: Floats
    ) -> NDArray[np.int64]:
        """By the plain sampler's rule on what could be kept of all slices, as if that were the vocabulary."""
        top_k = (columns["top_k"] > 0) & (columns["top_k"] < self.vocabulary)
        top_p = np.flatnonzero(~top_k & (columns["top_p"] < 1))
        ids, values = self._gather(logits, self._bounds(logits, peaks, totals, columns, top_k))
        kept = columns.copy()
        flat = top_p[:0]
        if len(top_p):
            asked = columns["top_p"][top_p] * totals[top_p]
            weights = (values[top_p] - peaks[top_p, None]) / columns["temperature"][top_p, None]
            held = np.exp(weights).sum(axis=1)
            # The share of the candidates that is the asked share of all.
            kept["top_p"][top_p] = np.minimum(asked / held, 1 - 1e-12)
            flat = top_p[held < asked * (1 + ROUNDING)]
        tokens = _pick_at(ids, values, peaks, kept, numbers, logits)
        if len(flat):
            # Few tokens do not hold the mass asked for: these draws see their whole rows, as on one rank.
            lowest = np.full(len(flat), torch.finfo(logits.dtype).min)
            ids, values = self._gather(take_rows(logits, flat), lowest)
            tokens[flat] = _pick_at(ids, values, peaks[flat], columns[flat], numbers[flat], logits)
        return tokens

    def _bounds(
        self,
        logits: Tensor,
        peaks: Floats,
        totals: Floats,
        columns: NDArray[np.void],
        top_k: NDArray[np.bool_],
    ) -> Floats:
        """Per draw a logit that everything reaches which a cut could keep, and rarely much else."""
        temperatures = columns["temperature"]
        # top-p: tokens that weigh less than a thousandth of what may be left out, as the plain sampler tries first.
        rest = np.maximum(totals * (1 - columns["top_p"]), np.finfo(np.float64).tiny)
        bounds = peaks + temperatures * np.log(rest / 1024)
        min_p = ~top_k & (columns["top_p"] >= 1)
        if min_p.any():
            reach = temperatures[min_p] * np.log(columns["min_p"][min_p])
            bounds[min_p] = peaks[min_p] + reach - ROUNDING * (np.abs(peaks[min_p]) + np.abs(reach))
        if top_k.any():
            rows = np.flatnonzero(top_k)
            counts = np.minimum(columns["top_k"][rows], logits.shape[-1])
            bounds[rows] = top_k_bounds(take_rows(logits, rows), counts)
        finite: Floats = np.maximum(bounds, torch.finfo(logits.dtype).min)
        return finite

    def _gather(self, logits: Tensor, bounds: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Tokens and logits that reach the bounds, of all slices, [draws, most], in token order; -infinity fills
        up."""
        rows, places = at_least(logits, bounds)
        sizes = np.bincount(rows, minlength=len(bounds))
        widest = int(self._exchange(np.array([float(sizes.max(initial=0))])).max())
        found = np.full((len(bounds), widest, 2), -np.inf)
        order = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        found[rows, order, 0] = places + self.tokens.start
        found[rows, order, 1] = values_at(logits, rows, places)
        parts = np.concatenate(self._exchange(found), axis=1)  # [draws, slices * widest, 2]
        possible = np.isfinite(parts[:, :, 1])
        # What fills up goes to the end, so that the rest stays in token order.
        by_place = np.argsort(~possible, axis=1, kind="stable")[:, : max(1, int(possible.sum(axis=1).max()))]
        parts = np.take_along_axis(parts, by_place[:, :, None], axis=1)
        return np.where(np.isfinite(parts[:, :, 0]), parts[:, :, 0], 0).astype(np.int64), parts[:, :, 1]

    # -- log-probabilities ----------------------------------------------------------------------------
    def token_logprobs(
        self, logits: Tensor, tokens: NDArray[np.int64], alternatives: NDArray[np.int64]
    ) -> list[TokenLogprobs]:
        """Same as the plain sampler's; each slice tells its sum, its likeliest, and how many are likelier."""
        draws = np.arange(len(tokens))
        local, _ = peaks_of(logits)
        here = (tokens >= self.tokens.start) & (tokens < self.tokens.stop)
        index = np.where(here, tokens - self.tokens.start, 0)
        values = as_float64(logits.gather(1, as_tensor(index, logits)[:, None]))[:, 0]
        most = int(np.minimum(alternatives, self.vocabulary).max(initial=0))
        told = np.full((len(tokens), 3 + 2 * most), -np.inf)
        told[:, 0], told[:, 1] = local, _masses(logits, local, np.ones(len(tokens)))
        told[here, 2] = values[here]
        counts = np.minimum(alternatives, logits.shape[-1])
        rows = np.flatnonzero(counts > 0)
        if len(rows):
            likeliest = most_likely(take_rows(logits, rows), counts[rows])
            for row, best, their in zip(rows, *likeliest, strict=True):
                told[row, 3 : 3 + len(best)] = np.array(best) + self.tokens.start
                told[row, 3 + most : 3 + most + len(best)] = their
        offers = self._exchange(told)
        peaks = offers[:, :, 0].max(axis=0)
        sums = (offers[:, :, 1] * np.exp(offers[:, :, 0] - peaks)).sum(axis=0)
        normalisers = peaks + np.log(sums)
        chosen = offers[:, :, 2].max(axis=0)
        likelier = as_float64(logits) > chosen[:, None]
        ranks = 1 + self._exchange(likelier.sum(axis=1).astype(np.float64)[:, None])[:, :, 0].sum(axis=0)
        ids = np.concatenate(offers[:, :, 3 : 3 + most], axis=1)  # [draws, slices * most]
        their_logits = np.concatenate(offers[:, :, 3 + most :], axis=1)
        entries = []
        for draw in draws.tolist():
            order = np.lexsort((ids[draw], -their_logits[draw]))[: max(0, int(alternatives[draw]))]
            top = [
                (int(ids[draw, place]), float(their_logits[draw, place] - normalisers[draw]))
                for place in order
                if np.isfinite(ids[draw, place])
            ]
            logprob = float(chosen[draw] - normalisers[draw])
            entries.append(TokenLogprobs(int(tokens[draw]), logprob, int(ranks[draw]), top))
        return entries


def _pick_at(
    ids: NDArray[np.int64],
    values: Floats,
    peaks: Floats,
    columns: NDArray[np.void],
    numbers: Floats,
    like: Tensor,
) -> NDArray[np.int64]:
    picked = pick_tokens(torch.from_numpy(np.ascontiguousarray(values)).to(like), peaks, columns, numbers)
    found: NDArray[np.int64] = ids[np.arange(len(ids)), picked]
    return found


def _masses(logits: Tensor, peaks: Floats, temperatures: Floats) -> Floats:
    """Sums of exponentials, measured from each row's own peak; 0 where no token is possible."""
    finite = np.isfinite(peaks)
    sums: Floats = block_sums(exponentials(logits, np.where(finite, peaks, 0.0), temperatures)).sum(axis=1)
    return np.where(finite, sums, 0.0)


def _floating(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _errors(unedited: Floats, peaks: Floats, batch: DrawBatch) -> dict[int, str]:
    """NaN wins every maximum, so a finite peak means a sound row."""
    sound = np.isfinite(unedited)
    errors = {
        int(d): f"the model returned {'NaN' if np.isnan(unedited[d]) else 'infinite'} logits"
        for d in np.flatnonzero(~sound)
    }
    if batch.masks is not None:
        errors.update(batch.masks.errors)
    errors.update({int(d): NO_TOKEN_LEFT for d in np.flatnonzero(sound & ~np.isfinite(peaks))})
    return errors
