"""AdapterBank: all adapters of a decoder, side by side in memory, each in a slot. Made by the player where adapters
are served; a decoder's matrices add what their rows' adapters say.

Nothing is moved when adapters come and go: a slot's memory is written while others' rows are computed, and only
where nobody's rows refer to it.
"""

import torch
from torch import Tensor

from cumulo.kernels.low_rank import AdapterGroups, AdapterRows, LowRankStack, add_low_rank
from cumulo.layout.pieces import padded_rank
from cumulo.layout.serving import RankPart
from cumulo.models.adapters.files import AdaptableMatrix, AdapterWeights, adaptable_matrices
from cumulo.models.batch import lazy_zeros
from cumulo.models.decoder import Decoder
from cumulo.models.linear import Linear
from cumulo.spec.model import ModelSpec


class AdaptedMatrix:
    """What all adapters add to one matrix of the decoder; its Linear asks."""

    def __init__(self, matrix: AdaptableMatrix, bank: "AdapterBank") -> None:
        self.matrix, self._bank = matrix, bank
        parts, slots, rank_max = len(matrix.sections), bank.slots, bank.rank_max
        a = lazy_zeros((slots, parts * rank_max, matrix.inputs), bank.dtype, bank.device)
        if bank.device.type == "cpu":  # the native kernel's vectors run along the outputs
            b = lazy_zeros((slots, rank_max, matrix.outputs), bank.dtype, bank.device).transpose(1, 2)
        else:
            b = lazy_zeros((slots, matrix.outputs, rank_max), bank.dtype, bank.device)
        ranks = torch.zeros((slots, parts), dtype=torch.int32)
        bounds = (*(section.start for section in matrix.sections), matrix.outputs)
        self.stack = LowRankStack(a, b, ranks, bounds, ranks.to(bank.device))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """y plus what the adapters of the step's rows make of x; in place."""
        groups = self._bank.groups
        return y if groups is None else add_low_rank(x, y, self.stack, groups)

    def install(self, slot: int, weights: AdapterWeights) -> int:
        """Replace what the slot held. The bytes that its adapter takes."""
        stack, rank_max = self.stack, self._bank.rank_max
        if stack.ranks[slot].any():  # kernels may read a slot up to the greatest rank
            stack.a[slot], stack.b[slot], stack.ranks[slot] = 0, 0, 0
        taken = 0
        for index, section in enumerate(self.matrix.sections):
            pair = weights.pairs.get(section.source)
            if pair is None:
                continue
            first = index * rank_max
            a, b = pair.a[:, section.own_columns], pair.b[section.own_rows]
            stack.a[slot, first : first + pair.rank] = a.to(stack.a.dtype)
            # In the wider of the two types: a scale that is no power of two rounds once.
            wide = torch.promote_types(b.dtype, torch.promote_types(stack.b.dtype, torch.float32))
            stack.b[slot, section.start : section.stop, : pair.rank] = (b.to(wide) * pair.scale).to(
                stack.b.dtype
            )
            stack.ranks[slot, index] = pair.rank
            taken += (a.numel() + b.numel()) * stack.a.itemsize
        if stack.device_ranks is not stack.ranks:
            stack.device_ranks[slot] = stack.ranks[slot]
        return taken


class AdapterBank:
    def __init__(
        self, decoder: Decoder, spec: ModelSpec, slots: int, rank_max: int, part: RankPart | None = None
    ) -> None:
        """`spec`: of the whole model; `part`: what `decoder` holds of it. The decoder's matrices learn of their
        adapters here, and it of its bank."""
        self.spec, self.slots, self.rank_max = spec, slots, padded_rank(rank_max)
        self.dtype, self.device = decoder.dtype, decoder.final_norm.weight.device
        self.groups: AdapterGroups | None = None  # of the step that is being computed
        self.matrices: dict[str, AdaptedMatrix] = {}
        for matrix in adaptable_matrices(spec, part):
            linear = decoder.get_submodule(matrix.name)
            assert isinstance(linear, Linear) and linear.shape == (matrix.outputs, matrix.inputs)
            linear.adapted = self.matrices[matrix.name] = AdaptedMatrix(matrix, self)
        self._taken = [0] * slots
        decoder.bank = self

    def begin(self, rows: AdapterRows | None) -> None:
        """A step's rows are about to be computed."""
        self.groups = None if rows is None else rows.tokens

    def install(self, slot: int, weights: AdapterWeights) -> None:
        """Put an adapter where no row of a step under way refers to."""
        self._taken[slot] = sum(matrix.install(slot, weights) for matrix in self.matrices.values())

    @property
    def nbytes(self) -> int:
        """Reserved on a device; on a CPU what was written, the system commits a page when it is first."""
        if self.device.type == "cpu":
            return sum(self._taken)
        return sum(one.stack.a.nbytes + one.stack.b.nbytes for one in self.matrices.values())
