"""Kernels that start while the one before them ends (programmatic dependent launch): in a step of few rows,
starting a kernel takes as long as what it computes. Who launches such kernels passes `early(...)` on to the launch.

A kernel with EARLY says at once that the next one may start, loads what no kernel of the step writes (weights), and
waits before it touches anything else. As every one of them waits for the whole kernel before it, what earlier ones
wrote is there, too.
"""

from typing import Any

import torch

EARLY_ROWS = 8  # with more, kernels are longer than their start


def early(wanted: bool, near: torch.Tensor) -> dict[str, Any]:
    """Options of a launch; `near`: a tensor on the device where it runs. Triton's interpreter has no such start."""
    return {"EARLY": True, "launch_pdl": True} if wanted and near.is_cuda else {"EARLY": False}
