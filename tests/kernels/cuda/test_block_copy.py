"""KV blocks of several layers go from one cache into another in one launch; nothing else is touched."""

import torch

from cumulo.kernels.cuda.collective.block_copy import copy_blocks


def test_blocks_of_the_asked_layers_arrive_and_no_other_changes(device: torch.device) -> None:
    source = torch.arange(3 * 5 * 300, dtype=torch.int64, device=device).view(3, 5, 300)
    target = torch.full((3, 7, 300), -1, dtype=torch.int64, device=device)
    places = torch.tensor([4, 0, 2, 1, 6, 3], dtype=torch.int32, device=device)
    other = torch.full_like(target, -1)
    copy_blocks([source, -source], [target, other], places, 3, 1, 2)
    expected = torch.full_like(target, -1)
    for layer in (1, 2):
        expected[layer, [1, 6, 3]] = source[layer, [4, 0, 2]]
    assert torch.equal(target, expected)
    assert torch.equal(other, torch.where(expected == -1, -1, -expected))
