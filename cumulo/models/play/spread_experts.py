"""SpreadExperts: the experts of one rank of expert-parallel serving, with copies of those that get most tokens. A
RankDecoder has one where redundant experts were asked for.

Every rank of a stage routes the rows of all of them, so all count the same loads. After so many steps the first
rank's counts are shared, each decides the same placement (`layout/expert_copies`), and weights go from rank to rank
before the next step computes anything.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cumulo.errors import ConfigError
from cumulo.layout.expert_placement import ExpertCopies, HeldCopy, first_places, place_copies
from cumulo.layout.serving import RankPart
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.moe import Experts, MixtureOfExperts, gated
from cumulo.models.play.rank_links import RankLinks


class SpreadExperts:
    def __init__(
        self, decoder: Decoder, part: RankPart, links: RankLinks, redundant: int, every_steps: int
    ) -> None:
        """`redundant`: copies beyond one of each expert, over all ranks of the stage."""
        moe = part.whole.moe
        assert moe is not None and links.stage is not None
        self._links, self._group, self._every_steps = links, links.stage, every_steps
        self._mixtures: list[MixtureOfExperts] = []
        for layer in decoder.layers:
            assert isinstance(layer, Layer)
            if isinstance(layer.ffn, MixtureOfExperts):
                self._mixtures.append(layer.ffn)
        at = self._group.index
        first = first_places(moe.experts, self._group.size, redundant)
        self.placed: list[ExpertCopies] = [first] * len(self._mixtures)  # by layer with experts
        self._number = {id(mixture.experts): number for number, mixture in enumerate(self._mixtures)}
        self._held: list[list[HeldCopy]] = [first.held(at) for _ in self._mixtures]
        self._loads = torch.zeros((len(self._mixtures), moe.experts), dtype=torch.int64)
        self._steps = 0
        for mixture in self._mixtures:
            if mixture.experts.packed:
                raise ConfigError("redundant experts need unquantised experts: omit redundant_experts")
            _give_places(mixture.experts, len(first.places[at]))

    def begin_step(self) -> None:
        """Between two steps: place experts anew, if it is time."""
        self._steps += 1
        if self._steps % self._every_steps == 0:
            self._links.share_with_stage(self._loads)
            for number, loads in enumerate(self._loads.tolist()):
                self._place(number, place_copies(loads, self.placed[number]))
            self._loads.zero_()

    @torch.no_grad()
    def _place(self, number: int, after: ExpertCopies) -> None:
        """Weights that ranks need go to them; places are overwritten when everything has been sent."""
        experts, group = self._mixtures[number].experts, self._group
        moves = self.placed[number].moves_to(after)
        at = {one.expert: one.place for one in reversed(self._held[number])}
        leaving, arrived = [], []
        for move in moves:
            if move.source == group.index:
                weights = [side[at[move.expert]].clone() for side in (experts.gate_up, experts.down)]
                if move.target == group.index:
                    arrived.append((move.place, weights))
                else:
                    leaving += [(group.send(one, move.target), one) for one in weights]
        for move in moves:
            if move.target == group.index != move.source:
                sides = (torch.empty_like(experts.gate_up[0]), torch.empty_like(experts.down[0]))
                arrived.append(
                    (move.place, [group.receive(side, move.source, counted=False) for side in sides])
                )
        for work, _ in leaving:
            work.wait()
        for place, (gate_up, down) in arrived:
            experts.gate_up[place], experts.down[place] = gate_up, down
        self.placed[number] = after
        self._held[number] = after.held(group.index)

    def __call__(self, experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """What the experts held here add to each token, [T, hidden]; `chosen` counts all experts."""
        number = self._number[id(experts)]
        counted = self._loads[number]
        counted += torch.bincount(chosen.flatten(), minlength=len(counted))
        return held_experts(experts, self._held[number], x, weights, chosen, self._links)


def held_experts(
    experts: Experts, held: Sequence[HeldCopy], x: Tensor, weights: Tensor, chosen: Tensor, links: RankLinks
) -> Tensor:
    """What the experts held here add to each token, [T, hidden]; `chosen` counts all experts. Copies of one expert
    take turns."""
    total, routed = torch.zeros_like(x), 0
    for place, expert, copy, copies in held:
        tokens, choices = (chosen == expert).nonzero(as_tuple=True)
        if copies > 1:
            own = tokens % copies == copy
            tokens, choices = tokens[own], choices[own]
        if len(tokens):
            routed += len(tokens)
            result = experts.matmul("down", place, gated(experts.matmul("gate_up", place, x[tokens])))
            total.index_add_(0, tokens, result * weights[tokens, choices].to(x.dtype)[:, None])
    links.count_routed(routed)
    return total


def _give_places(experts: Experts, places: int) -> None:
    """Room for copies behind the experts that were loaded."""
    for name in ("gate_up", "down"):
        loaded: Tensor = getattr(experts, name)
        if places > len(loaded):
            room = loaded.new_zeros((places - len(loaded), *loaded.shape[1:]))
            setattr(experts, name, nn.Parameter(torch.cat((loaded.detach(), room)), requires_grad=False))
