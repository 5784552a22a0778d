"""Draw one token per row of logits on the device: greedy, or at a temperature from the whole vocabulary. No host.

The random number of a draw is the same function of (seed, sample, position) as on a CPU
(engine/sampling/distribution.py), and a token is picked the same way: by inverting the cumulative distribution
in token order.

Must move: the logits once, and one part of each row a second time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096  # tokens whose maximum and mass one program finds
BLOCK = 64  # tokens whose maximum is kept where draws have cuts (sample_cuts.py)
# Columns of a draw, as int32 words; floats are stored as their bits.
SLOT, POSITION, TEMPERATURE, SEED_LOW, SEED_HIGH, SAMPLE_INDEX, TOP_K, TOP_P, MIN_P, COLUMNS = range(10)


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return value ^ (value >> 31)


@triton.jit
def uniform(low, high, sample_index, position):
    """SplitMix64 chained over seed, sample and position: in [0, 1), a multiple of 2^-53 as float64."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    one = tl.full((), 1, tl.uint64)
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    state = _mix(seed + golden)
    state = _mix(state + (sample_index.to(tl.uint64) + one) * golden)
    state = _mix(state + (position.to(tl.uint64) + one) * golden)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize_on_alignment=["draws"])
def _partial(logits, draws, maxima, places, masses, tops, vocabulary, logit_stride, parts, COLUMNS: tl.constexpr,
             TEMPERATURE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(draws + row * COLUMNS + TEMPERATURE).to(tl.float32, bitcast=True)
    token = part * PART + tl.arange(0, PART)
    inside = token < vocabulary
    x = tl.load(logits + row.to(tl.int64) * logit_stride + token, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    peak = tl.max(x, 0)
    place = tl.min(tl.where(x == peak, token, vocabulary), 0)  # of equals the lowest
    cooled = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    # A part that is all -infinity has no mass; NaN anywhere stays NaN.
    weights = tl.where(x == float("-inf"), 0.0, tl.exp((x - peak) * cooled))
    tl.store(maxima + row * parts + part, peak)
    tl.store(places + row * parts + part, place)
    tl.store(masses + row * parts + part, tl.sum(weights, 0))
    if BLOCK > 0:
        blocks: tl.constexpr = PART // BLOCK
        top = tl.max(tl.reshape(x, (blocks, BLOCK)), 1)
        tl.store(tops + (row * parts + part).to(tl.int64) * blocks + tl.arange(0, blocks), top)


@triton.jit(do_not_specialize_on_alignment=["draws"])
def _pick(logits, slices, draws, maxima, places, masses, picked, tokens, vocabulary, logit_stride, token_stride,
          parts, COLUMNS: tl.constexpr, SLOT: tl.constexpr, POSITION: tl.constexpr, TEMPERATURE: tl.constexpr,
          SEED_LOW: tl.constexpr, SEED_HIGH: tl.constexpr, SAMPLE_INDEX: tl.constexpr,
          PART: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr):  # fmt: skip
    """With SLICES > 1 each slice of the vocabulary lies on another rank: `slices`, `maxima`, `places` and `masses`
    are tables of their addresses, and `vocabulary` and `parts` count one slice's."""
    row = tl.program_id(0)
    draw = draws + row * COLUMNS
    temperature = tl.load(draw + TEMPERATURE).to(tl.float32, bitcast=True)
    index = tl.arange(0, PARTS)
    inside = index < parts * SLICES
    owner = index // parts
    at = row * parts + index % parts
    if SLICES > 1:
        maxima = tl.load(maxima + owner, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        masses = tl.load(masses + owner, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        places = tl.load(places + owner, mask=inside, other=0).to(tl.pointer_type(tl.int32))
    peaks = tl.load(maxima + at, mask=inside, other=float("-inf"))
    mass = tl.load(masses + at, mask=inside, other=0.0)
    peak = tl.max(peaks, 0)
    sound = (tl.sum(tl.where(mass == mass, 0, 1), 0) == 0) & (peak > float("-inf")) & (peak < float("inf"))
    place = tl.load(places + at, mask=inside, other=0) + owner * vocabulary
    token = tl.min(tl.where(inside & (peaks == peak), place, vocabulary * SLICES), 0)
    if temperature > 0:
        cooled = 1.0 / temperature
        mass = tl.where(peaks == float("-inf"), 0.0, mass * tl.exp((peaks - peak) * cooled))
        cumulative = tl.cumsum(mass, 0)
        total = tl.max(cumulative, 0)
        number = uniform(tl.load(draw + SEED_LOW), tl.load(draw + SEED_HIGH), tl.load(draw + SAMPLE_INDEX),
                         tl.load(draw + POSITION))  # fmt: skip
        target = (number * total.to(tl.float64)).to(tl.float32)
        last = tl.max(tl.where(mass > 0, index, 0), 0)
        part = tl.minimum(tl.sum(tl.where(inside & (cumulative <= target), 1, 0), 0), last)
        before = tl.sum(tl.where(index < part, mass, 0.0), 0)
        first = (part % parts) * PART
        choice = first + tl.arange(0, PART)
        source = logits
        if SLICES > 1:
            source = tl.load(slices + part // parts).to(tl.pointer_type(logits.dtype.element_ty))
        x = tl.load(
            source + row.to(tl.int64) * logit_stride + choice, mask=choice < vocabulary, other=float("-inf")
        )
        weights = tl.exp((x.to(tl.float32) - peak) * cooled)
        reached = before + tl.cumsum(weights, 0)
        final = tl.max(tl.where(weights > 0, choice, first), 0)
        token = tl.minimum(first + tl.sum(tl.where(reached <= target, 1, 0), 0), final)
        token += (part // parts) * vocabulary
    token = tl.where(sound, token, -1)  # the host turns this into the request's error
    tl.store(picked + row, token)
    slot = tl.load(draw + SLOT).to(tl.int64)
    if slot >= 0:
        position = tl.load(draw + POSITION)
        tl.store(tokens + slot * token_stride + position, tl.maximum(token, 0))


def part_count(vocabulary: int) -> int:
    return -(-vocabulary // PART)


class SampleBuffers:
    """What `sample` keeps between its two kernels, for up to `rows` draws."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        self.parts = part_count(vocabulary)
        self.maxima = torch.empty((rows, self.parts), dtype=torch.float32, device=device)
        self.places = torch.empty((rows, self.parts), dtype=torch.int32, device=device)
        self.masses = torch.empty((rows, self.parts), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.maxima.nbytes + self.places.nbytes + self.masses.nbytes


def sample(
    logits: Tensor,
    draws: Tensor,
    buffers: SampleBuffers,
    picked: Tensor,
    tokens: Tensor,
    tops: Tensor | None = None,
) -> None:
    """logits [R, V] and draws [R, COLUMNS] int32 -> picked [R] int32 (-1: not finite), also entered into
    tokens[slot, position].

    `tops` [R, parts * PART / BLOCK] float32, if given, gets every block's largest logit.
    """
    if len(logits) == 0:
        return
    weigh_parts(logits, draws, buffers.maxima, buffers.places, buffers.masses, tops)
    pick_token(logits, draws, buffers.maxima, buffers.places, buffers.masses, picked, tokens)


def weigh_parts(
    logits: Tensor, draws: Tensor, maxima: Tensor, places: Tensor, masses: Tensor, tops: Tensor | None = None
) -> None:
    """Of each part of each row its largest logit, where that is, and the part's mass relative to it."""
    rows, vocabulary = logits.shape
    parts = part_count(vocabulary)
    _partial[(rows, parts)](
        logits, draws, maxima, places, masses, tops, vocabulary, logits.stride(0), parts,
        COLUMNS=COLUMNS, TEMPERATURE=TEMPERATURE, PART=PART, BLOCK=0 if tops is None else BLOCK, num_warps=8,
    )  # fmt: skip


def pick_token(
    logits: Tensor, draws: Tensor, maxima: Tensor, places: Tensor, masses: Tensor, picked: Tensor, tokens: Tensor,
    slices: Tensor | None = None,
) -> None:  # fmt: skip
    """From the parts to a token. If the vocabulary is cut over ranks, `logits` is this rank's slice, `slices` has
    the addresses of all ranks', and `maxima`, `places` and `masses` are such tables, too."""
    rows, vocabulary = logits.shape
    parts, count = part_count(vocabulary), 1 if slices is None else len(slices)
    _pick[(rows,)](
        logits, logits if slices is None else slices, draws, maxima, places, masses, picked, tokens, vocabulary,
        logits.stride(0), tokens.stride(0), parts,
        COLUMNS=COLUMNS, SLOT=SLOT, POSITION=POSITION, TEMPERATURE=TEMPERATURE, SEED_LOW=SEED_LOW,
        SEED_HIGH=SEED_HIGH, SAMPLE_INDEX=SAMPLE_INDEX, PART=PART, PARTS=triton.next_power_of_2(parts * count),
        SLICES=count, num_warps=8,
    )  # fmt: skip
