"""AdamW with its two moments in 8 bits each (Dettmers et al. 2021). A rule of the optimizer's.

Runs of 256 numbers share a scale, their largest magnitude, and each is stored as the nearest of 256 values between
-1 and 1 (0 and 1) that lie dense near zero: dynamic tree quantisation. Of the second moment the root is stored: it
has the range of the first, so that no step divides by a zero that was only small. 2.03 bytes per weight, not 8.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cumulo.train.decide.config import OptimizerConfig

BLOCK = 256
_AT_ONCE = BLOCK << 14  # numbers widened at a time: the rest stays small
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """Numbers in blocks; the last block is filled up with zeros."""

    codes: Tensor  # uint8 [blocks, BLOCK]
    scales: Tensor  # float32 [blocks]
    signed: bool

    @classmethod
    def zeros(cls, numbers: int, signed: bool, device: torch.device) -> "Quantised":
        blocks = -(-numbers // BLOCK)
        zero = int(levels(signed).abs().argmin())
        codes = torch.full((blocks, BLOCK), zero, dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(blocks, device=device), signed)

    def read(self, begin: int, numbers: int) -> Tensor:
        """Numbers from `begin` on (a block's beginning), float32."""
        blocks = slice(begin // BLOCK, -(-(begin + numbers) // BLOCK))
        table = levels(self.signed, self.codes.device)
        return (table[self.codes[blocks].int()] * self.scales[blocks, None]).flatten()[:numbers]

    def write(self, begin: int, values: Tensor) -> None:
        """The inverse of `read`: flat values, whole blocks unless they are the last."""
        wide = torch.nn.functional.pad(values.float(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
        blocks = slice(begin // BLOCK, begin // BLOCK + len(wide))
        # With its sign: the largest is then 1 exactly, and what was read and is written again is the same.
        scales = wide.gather(1, wide.abs().argmax(1, keepdim=True))[:, 0]
        unit = wide / torch.where(scales != 0, scales, 1.0)[:, None]
        codes = torch.bucketize(unit, _borders(self.signed, unit.device), out_int32=True)
        if not self.signed:
            codes = torch.where(unit > 0, codes.clamp(min=1), codes)  # small is not nothing: it is divided by
        self.codes[blocks] = codes.to(torch.uint8)
        self.scales[blocks] = scales


@cache
def levels(signed: bool, device: torch.device = _HOST) -> Tensor:
    """The 256 values, ascending. After the sign, zeros count the decimal exponent; a one ends them; the bits that
    are left say where between 0.1 and 1 (Dettmers et al. 2021, section 1.3)."""
    bits = 6 if signed else 7
    magnitudes = [
        10.0**-exponent * (0.1 + 0.9 * (index + 0.5) / count)
        for exponent in range(7)
        for count in (2 ** (bits - exponent),)
        for index in range(count)
    ]
    values = [0.0, 1.0, *magnitudes, *([-value for value in magnitudes] if signed else [])]
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def _borders(signed: bool, device: torch.device) -> Tensor:
    table = levels(signed, device)
    return (table[1:] + table[:-1]) / 2


class Adam8bit:
    def __init__(self, tensors: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self.config, self.tensors = config, tensors
        self._steps = {name: torch.zeros((), dtype=torch.float32) for name in tensors}
        self._first, self._root = (
            {name: Quantised.zeros(t.numel(), signed, t.device) for name, t in tensors.items()}
            for signed in (True, False)
        )
        self._widened: dict[str, Tensor] = {}  # handed out by `state`, until the next step

    @torch.no_grad()
    def step(self, share: float) -> None:
        self._widened.clear()
        config, rate = self.config, self.config.learning_rate * share
        for name, tensor in self.tensors.items():
            if tensor.grad is None:
                continue
            self._steps[name] += 1
            steps = float(self._steps[name])
            first_share, second_share = 1 - config.beta1**steps, 1 - config.beta2**steps
            tensor.mul_(1 - rate * (config.weight_decay if tensor.ndim > 1 else 0.0))
            flat, gradients = tensor.view(-1), tensor.grad.reshape(-1)
            for begin, count in _stretches(tensor.numel()):
                gradient = gradients[begin : begin + count].float()
                first = self._first[name].read(begin, count).lerp_(gradient, 1 - config.beta1)
                second = self._root[name].read(begin, count).square_()
                second.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
                root = second.sqrt_()
                self._first[name].write(begin, first)
                self._root[name].write(begin, root)
                change = first / (root / second_share**0.5 + config.epsilon)
                flat[begin : begin + count].sub_(change.to(flat.dtype), alpha=rate / first_share)

    def state(self) -> dict[str, Tensor]:
        """Widened, with the names of AdamW's: what is saved does not depend on where blocks begin."""
        if not self._widened:
            for name, tensor in self.tensors.items():
                first = self._first[name].read(0, tensor.numel())
                second = self._root[name].read(0, tensor.numel()).square_()
                self._widened |= {
                    f"{name}.step": self._steps[name],
                    f"{name}.exp_avg": first.view(tensor.shape),
                    f"{name}.exp_avg_sq": second.view(tensor.shape),
                }
        return dict(self._widened)

    def loaded(self) -> None:
        """What `state` handed out may be overwritten. Numbers of the same blocks become the same codes again."""
        if not self._widened:
            return
        for name in self.tensors:
            self._first[name].write(0, self._widened[f"{name}.exp_avg"].flatten())
            self._root[name].write(0, self._widened[f"{name}.exp_avg_sq"].flatten().sqrt())
        self._widened.clear()

    @property
    def kept_bytes(self) -> int:
        """What the moments take between steps."""
        kept = (*self._first.values(), *self._root.values())
        return sum(moment.codes.nbytes + moment.scales.nbytes for moment in kept)


def _stretches(numbers: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(_AT_ONCE, numbers - begin)) for begin in range(0, numbers, _AT_ONCE))
