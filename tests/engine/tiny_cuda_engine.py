"""A whole engine on a tiny random model, played by the GPU's kernels or by torch's operators. Without a GPU
Triton's interpreter plays the kernels.

Import it before anything that defines a kernel: it asks for the interpreter.
"""

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton import next_power_of_2  # noqa: E402

from cumulo.engine.decide import plan as step_plan  # noqa: E402
from cumulo.engine.decide.core.config import SchedulerConfig  # noqa: E402
from cumulo.engine.decide.scheduler import Scheduler  # noqa: E402
from cumulo.engine.decide.speculation.choose import most_draws  # noqa: E402
from cumulo.engine.engine import Engine  # noqa: E402
from cumulo.engine.play.runner_cuda import CudaRunner  # noqa: E402
from cumulo.engine.play.runner_torch import TorchRunner  # noqa: E402
from cumulo.kernels.cuda.linear import linear, small_linear  # noqa: E402
from cumulo.kernels.cuda.moe import few as moe_few  # noqa: E402
from cumulo.models.adapters.bank import AdapterBank  # noqa: E402
from cumulo.models.batch import KVCache  # noqa: E402
from cumulo.models.decoder import Decoder  # noqa: E402
from cumulo.models.play.cuda_decoder import CudaDecoder  # noqa: E402
from cumulo.spec.model import MLASpec, ModelSpec, MoESpec  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
EOS = 7
BASE: dict[str, Any] = dict(
    family="tiny", vocab_size=53, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_hidden=48,
    max_context=128, eos_token_ids=(EOS,),
)  # fmt: skip
SPECS = {
    "dense": ModelSpec(**BASE),
    "window": ModelSpec(**BASE, sliding_window=9, qk_norm=True, tied_embeddings=True, qkv_bias=True),
    "experts": ModelSpec(**BASE, moe=MoESpec(experts=4, experts_per_token=2, expert_hidden=16)),
    "latent": ModelSpec(
        **BASE, mla=MLASpec(24, kv_rank=32, nope_head_dim=16, rope_head_dim=16, value_head_dim=12),
        rope_interleaved=True, qkv_bias=True,
    ),
    "latent experts": ModelSpec(
        **BASE, mla=MLASpec(None, kv_rank=16, nope_head_dim=8, rope_head_dim=16, value_head_dim=16),
        moe=MoESpec(experts=4, experts_per_token=2, expert_hidden=16, shared_hidden=24, dense_layers=(0,),
                    scoring="sigmoid", groups=2, group_score="top2sum", selection_bias=True),
    ),
}  # fmt: skip


def use_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreted program takes milliseconds, however large: a GPU's tile of one row would take the whole time,
    and so would tokens that only fill up a shape."""
    if not HAS_GPU:
        monkeypatch.setattr(step_plan, "_EAGER_STEP", 16)
        monkeypatch.setattr(
            small_linear,
            "default_config",
            lambda n, k, *_: small_linear.SmallConfig(64, next_power_of_2(k), 4),
        )
        monkeypatch.setattr(linear, "_one_row", lambda *_: linear.Choice("small"))
        for name in ("UP", "DOWN"):
            monkeypatch.setattr(moe_few, name, moe_few.FewExpertsConfig(64, 1024, 4))


def widened(spec: ModelSpec) -> ModelSpec:
    """The same kind of model, large enough that a GPU cuts its products and contexts into several tiles."""
    mla = spec.mla and replace(spec.mla, kv_rank=128, nope_head_dim=64, rope_head_dim=64, value_head_dim=64)
    moe = spec.moe and replace(spec.moe, experts=16, experts_per_token=4, expert_hidden=128)
    window = spec.sliding_window and 90
    return replace(
        spec, vocab_size=1009, hidden=256, heads=8, kv_heads=2, head_dim=128, ffn_hidden=640, max_context=1024,
        mla=mla, moe=moe, sliding_window=window,
    )  # fmt: skip


def make_decoder(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(spec, dtype)
    generator = torch.Generator().manual_seed(3)
    for parameter in decoder.parameters():
        wide = parameter.dim() > 1
        spread = 0.3 if spec.hidden == BASE["hidden"] else 0.08
        random = torch.randn(parameter.shape, generator=generator)
        parameter.data = (spread * random if wide else 1 + 0.3 * random).to(dtype)
    return decoder.to(DEVICE)


def make_engine(
    decoder: Decoder, on_kernels: bool, overlap: bool = True, invariant: bool = False, fp8: bool = False,
    bank: AdapterBank | None = None, **options: Any,
) -> Engine:  # fmt: skip
    """With `fp8` weights and keys and values in 8 bits; it takes the decoder's plain weights away."""
    defaults = dict(blocks=24, block_size=16, max_context=120, max_running=6, max_tokens_per_step=48)
    config = SchedulerConfig(**{**defaults, **options})
    kv_dtype = torch.float8_e4m3fn if fp8 else decoder.dtype
    cache = KVCache(decoder.spec, config.blocks, config.block_size, kv_dtype, DEVICE)
    for storage in (cache.key_storage, cache.value_storage):
        storage.copy_(
            torch.full_like(storage, torch.nan, dtype=torch.float32)
        )  # what a block held cannot matter
    shared: dict[str, Any] = dict(
        max_slots=config.max_running,
        max_context=config.max_context,
        eos_token_ids=(EOS,),
        host_blocks=config.tier_blocks,
    )
    if on_kernels:
        model = CudaDecoder(
            decoder,
            config.max_tokens_per_step,
            most_draws(config.max_running, bool(config.speculate)),
            weights="fp8" if fp8 else "auto",
            batch_invariant=invariant,
            bank=bank,
        )
        runner = CudaRunner(model, cache, **shared)
    else:
        runner = TorchRunner(decoder, cache, bank=bank, **shared)
    return Engine(
        Scheduler(config), runner, None, vocab_size=decoder.spec.vocab_size, eos_ids=(EOS,), overlap=overlap
    )
