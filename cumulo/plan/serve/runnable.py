"""What keeps `cumulo serve` from running a replica that could be planned. The search asks it unless it may be
hypothetical."""

from cumulo.plan.serve.replica import CUMULO, Replica
from cumulo.spec.gpu_kernels import adapter_obstacle_of, obstacle_of


def obstacle(replica: Replica, split: bool = False) -> str:
    """In words; empty: `cumulo serve` runs it."""
    device, spec = replica.device, replica.spec
    if replica.engine != CUMULO:
        return f"{replica.engine} is not Cumulo's engine"
    if split and replica.pp > 1:
        return "prefill and decode apart need engines without a pipeline"
    if replica.acceptance and replica.ranks > 1:
        return "speculation runs on one rank"
    if replica.draft_tree and device.generation == "cpu":
        return "trees of drafts need a GPU"
    if replica.draft_tree and spec.sliding_window is not None:
        return "trees of drafts need full attention in every layer"
    if replica.kv_disk and replica.ranks > 1:
        return "prefixes are kept on disk by engines on one rank"
    if device.generation == "cpu":
        return ""
    if replica.max_loras and replica.ranks > 1:
        return "adapters are served on one GPU"
    if device.generation.startswith("cdna"):
        return f"the kernels are for NVIDIA's GPUs, and {device.name} is not one"
    if replica.ranks > 1 and not device.link_kind.startswith("nvlink"):
        return f"ranks on GPUs need NVLink, and {device.name} has {device.link_kind}"
    if replica.ranks > replica.node.gpus:
        return f"ranks on GPUs are of one host, and {replica.node.name} has {replica.node.gpus} GPUs"
    if spec.vocab_size % replica.tp:
        return f"tp {replica.tp} does not divide the vocabulary of {spec.vocab_size:,} tokens"
    quantised = replica.weights in ("float8", "int4") or replica.kv == "float8"
    if quantised and replica.max_loras and adapter_obstacle_of(spec) is not None:
        return "adapters of mixtures and of latent attention are not added to quantised formats on a GPU"
    if quantised and (why := obstacle_of(spec, "bfloat16")):
        return f"quantised formats need the GPU's kernels: {why}"
    return ""
