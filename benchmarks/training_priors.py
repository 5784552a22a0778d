"""What `fit_training.py` fits: constants of `efficiency.yaml`, what each is drawn to, and how loosely."""

# constant: (prior, how many times off it may easily be)
PRIORS: dict[str, tuple[float, float]] = {
    "product_share": (0.92, 1.08),  # real shapes and warm devices, against the best shape alone
    "product_share_8bit": (1.0, 1.1),
    "product_share_ampere": (1.0, 1.05),
    "product_share_hopper": (1.0, 1.05),
    "product_share_blackwell": (1.0, 1.05),
    "power_exponent": (0.6, 1.3),  # clocks under a power limit: between the cube root and the power itself
    "matmul_traffic": (0.3, 1.6),
    "fast_exponentials_gain": (1.4, 1.2),
    "passes_eager": (2.5, 1.35),
    "passes_fused": (2.2, 1.35),
    "passes_compiled": (1.6, 1.35),
    "passes_8bit": (1.2, 1.35),
    "passes_row_scaled": (3.0, 1.6),
    "logit_bytes": (25.0, 1.5),
    "weight_bytes": (10.0, 1.5),
    "optimizer_bytes": (40.0, 1.5),  # weights, gradients and two moments in 32 bits, read and written
    "launch_s": (1e-4, 1.6),
    "step_s": (0.02, 2.0),
    "tensor_exposed": (1.0, 1.2),
    "tensor_overlapped_exposed": (0.45, 1.5),
    "context_exposed": (0.3, 1.8),
    "data_exposed": (0.25, 1.5),
    "data_rate_deepspeed": (0.4, 2.0),  # small buckets, reduced and broadcast rank by rank
    "expert_passes": (20.0, 1.5),  # copies sorted, rounded, brought back, added up: each read and written
    "expert_bias_passes": (
        14.0,
        1.8,
    ),  # a clamped activation in six operations, each read and written, and a bias
    "fused_experts": (0.33, 1.2),  # of three times that copies are read and written, one is left
    "expert_launch_s": (1.7e-4, 2.2),
    "chunk_launch_s": (3e-4, 2.2),
    "expert_exposed": (0.6, 1.6),
    "expert_overlapped_exposed": (0.5, 1.5),
}
# How far attention kernels of one kind on one generation may easily be from their published rates.
ATTENTION_SPREAD = 1.16
ATTENTION = (
    ("ampere", "unfused"), ("ampere", "flash1"), ("hopper", "flash1"), ("hopper", "flash2"), ("hopper", "cudnn"),
    ("blackwell", "cudnn"),
)  # fmt: skip
