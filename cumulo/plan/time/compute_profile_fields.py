"""Profile: how fast a generation of devices runs under a generation of software, as a few constants. `compute` and
`step` turn work into seconds with one; `efficiency`, `cumulo calibrate` and the catalogue make them.

Nearly all constants are ratios to what the device's data sheet says, so that a profile can be carried to another
device of the same generation, and, with a wider interval, to another generation.
"""

from dataclasses import dataclass, fields
from typing import Literal

from cumulo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Profile:
    software: str  # the generation of software: "megatron-2021", "torchtitan-2024-compile", ...
    devices: str  # a generation of them, "hopper", or one by name, "a100-40gb"
    dtype: str  # of the matrix products
    note: str  # what the constants were taken from

    # -- what a device reaches ------------------------------------------------------------------------------
    matmul_efficiency: float  # of the peak rate, of a large matrix product
    matmul_traffic: float  # share of a product's operand traffic that its arithmetic does not hide
    attention_forward_efficiency: float  # of the 16-bit peak, causal half counted once, heads of 128
    attention_backward_efficiency: float
    # Width of a head at which softmax takes as long as the products: half the efficiency (Shah et al. 2024, section
    # 3.1: a Hopper device has 256 times more matrix FLOPs than exponentials).
    attention_half_width: float
    elementwise_passes: float  # traffic of everything between the products, over what ideal fusion would move
    score_bytes: float  # moved for each attention score in forward, where scores are stored at all
    logit_bytes: float  # moved for each logit, forward and backward together
    weight_bytes: float  # moved for each held parameter in each micro-batch: accumulation, casts, copies
    optimizer_bytes: float  # moved for each parameter the rank updates
    launch_s: float  # of one layer's forward: what the host adds that the device does not hide
    expert_passes: (
        float  # in forward over a mixture's token copies: sorted, quantised, brought back and added up
    )
    expert_bias_passes: float  # more of them, also over what is inside experts, where these have biases
    # Where the host waits for the sizes of an all-to-all: its time for each expert of a rank in a layer's forward,
    # which counts where the device is faster, and when a stage takes up another chunk; backward: twice that.
    expert_launch_s: float
    chunk_launch_s: float
    step_s: float  # of one step: data, logging, clipping, synchronisation

    # -- what of its communication a device waits for -------------------------------------------------------
    tensor_exposed: float
    tensor_overlapped_exposed: float  # with the job's `overlap_tensor`
    context_exposed: float
    expert_exposed: float
    expert_overlapped_exposed: float  # with the job's `overlap_expert`
    data_exposed: float
    data_rate: float  # of what the network could give them, the share that data-parallel collectives get
    # Gradients and weights travel in pieces of this size, each with a collective's latency; 0: layer by layer.
    bucket_bytes: float
    expert_imbalance: float  # tokens of the busiest expert rank over the mean

    # -- what "selective" recomputation repeats under this software -----------------------------------------
    selective_products: float  # share of the layer's matrix products
    selective_attention: bool  # the attention between its projections

    # Whether stages wait until a message between them has arrived: "" not, "slice" a tensor-parallel rank's part of
    # an activation (Narayanan et al. 2021, section 4.1), "whole" all of it (DeepSpeed's pipeline).
    waits_for_messages: Literal["", "slice", "whole"]
    balances_stages: bool  # whether stages get layers by cost, the loss counted, and not by number

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not value >= 0:
                raise ConfigError(f"profile {self.name}: {field.name} must be 0 or more, got {value}")
        for name in ("matmul_efficiency", "attention_forward_efficiency", "attention_backward_efficiency"):
            if not 0 < getattr(self, name) <= 1.5:
                raise ConfigError(
                    f"profile {self.name}: {name} is a share of the device's peak, in (0, 1.5]; "
                    f"got {getattr(self, name)}"
                )

    @property
    def name(self) -> str:
        return f"{self.software} / {self.devices} / {self.dtype}"
