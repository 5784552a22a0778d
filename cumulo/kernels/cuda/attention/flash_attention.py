"""Dense attention for training: packed documents or equal rows, grouped heads, forward and backward. Models in
training call `flash_attention`.

`flash_attention` takes rows of equal length [B, S, H, D] and lets whoever won on the device compute them: cuDNN or
the built-in flash attention through torch, or our kernels. `packed_attention` takes documents laid end to end
[T, H, D], none of which sees another, and also returns the log-sum-exp of every row, by which partial results can
be merged; it is ours always. Its gradients are the same bits every run.
"""

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulo.kernels.cuda.attention.flash_attention_backward import (
    BackwardConfig,
    default_backward,
    launch_backward,
)
from cumulo.kernels.cuda.attention.flash_attention_forward import (
    ForwardConfig,
    default_forward,
    launch_forward,
)

# Per head size: our tile sizes, as `tune` found them.
FORWARD: dict[str, ForwardConfig] = {}
BACKWARD: dict[str, tuple[BackwardConfig, BackwardConfig]] = {}


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, one document after another: out [T, H, D] and log-sum-exp [H, T]."""
    group = query.shape[1] // key.shape[1]
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    outs, sums = [], []
    bounds = list(zip(query_starts.tolist(), key_starts.tolist(), strict=True))
    for (q_begin, k_begin), (q_end, k_end) in pairwise(bounds):
        q = query[q_begin:q_end].transpose(0, 1)
        k = key[k_begin:k_end].transpose(0, 1).repeat_interleave(group, 0)
        v = value[k_begin:k_end].transpose(0, 1).repeat_interleave(group, 0)
        scores = (q @ k.transpose(1, 2)).to(wide) * scale
        if causal:
            queries, keys = q_end - q_begin, k_end - k_begin
            hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(keys - queries + 1)
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)  # of a row that sees nothing
        outs.append((weights.to(query.dtype) @ v).transpose(0, 1))
        sums.append(torch.logsumexp(scores, -1))
    return torch.cat(outs), torch.cat(sums, 1)


# -- packed documents -----------------------------------------------------------------------------------------
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """query [T, H, D], key and value [S, KV, D] -> out [T, H, D] and log-sum-exp [H, T] (natural, float32).

    Document d has queries query_starts[d] .. query_starts[d + 1] (int32, on the device) and the same keys unless
    `key_starts` says otherwise; with a causal mask its last query sees its last key. What lies past the last
    document gets zeros. The output is differentiable in query, key and value.
    """
    check_shapes(query, key, value)
    return torch.ops.cumulo.flash_attention(  # type: ignore[no-any-return]
        query, key, value, query_starts, query_starts if key_starts is None else key_starts, causal,
        query.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    heads, kv_heads = query.shape[-2], key.shape[-2]
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"attention of queries {tuple(query.shape)} over keys {tuple(key.shape)} and values "
            f"{tuple(value.shape)}: keys and values must have one shape, and the queries' head size"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide into groups for {kv_heads} key heads")


@torch.library.custom_op("cumulo::flash_attention", mutates_args=())
def flash_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    query, key, value = (_rows(x) for x in (query, key, value))
    out, lse = _results(query)
    if len(query):
        launch_forward(
            query, key, value, query_starts, key_starts, causal, scale, out, lse, forward_config(query)
        )
    return out, lse


@flash_attention_op.register_fake
def _results(query: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return _like(query), torch.empty((heads, tokens), dtype=torch.float32, device=query.device)


@torch.library.custom_op("cumulo::flash_attention_backward", mutates_args=())
def flash_attention_backward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, grad_out = (_rows(x) for x in (query, key, value, grad_out))
    grads = _like(query), _like(key), _like(value)
    if len(query) == 0 or len(key) == 0:
        return grads[0].zero_(), grads[1].zero_(), grads[2].zero_()
    launch_backward(
        query, key, value, out, lse, grad_out, query_starts, key_starts, causal, scale, grads,
        *backward_config(query),
    )  # fmt: skip
    return grads


@flash_attention_backward_op.register_fake
def _gradients(query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, ...]:
    return _like(query), _like(key), _like(value)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, query_starts, key_starts, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, query_starts, key_starts)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad_out: Tensor, grad_lse: Tensor):  # type: ignore[no-untyped-def]
    query, key, value, out, lse, query_starts, key_starts = ctx.saved_tensors
    grads = torch.ops.cumulo.flash_attention_backward(
        query, key, value, out, lse, grad_out, query_starts, key_starts, ctx.causal, ctx.scale
    )
    return (*grads, None, None, None, None)


flash_attention_op.register_autograd(_differentiate, setup_context=_keep)


def _rows(x: Tensor) -> Tensor:
    """The kernels take any stride of tokens and heads, but a head's numbers side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


# -- rows of equal length -------------------------------------------------------------------------------------
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """query [B, S, H, D], key and value [B, S, KV, D] -> [B, S, H, D]; differentiable. By cuDNN's kernels where
    they apply: they are written for each GPU's matrix units, and won at every shape that was timed on an H200."""
    check_shapes(query, key, value)
    batch, length, heads, dim = query.shape
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and dim <= 128:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            grouped = heads != key.shape[2]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    keys = key.shape[1]
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    key_starts = torch.arange(0, (batch + 1) * keys, keys, dtype=torch.int32, device=query.device)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (query, key, value))
    return packed_attention(q, k, v, starts, key_starts, causal=causal, scale=scale)[0].view(query.shape)


# -- tile sizes and costs -------------------------------------------------------------------------------------
def forward_config(query: Tensor) -> ForwardConfig:
    dim, dtype = query.shape[-1], query.dtype
    tuned = FORWARD.get(f"d{dim}") if dtype.itemsize == 2 else None
    return tuned or default_forward(dim, dtype)


def backward_config(query: Tensor) -> tuple[BackwardConfig, BackwardConfig]:
    dim, dtype = query.shape[-1], query.dtype
    tuned = BACKWARD.get(f"d{dim}") if dtype.itemsize == 2 else None
    return tuned or default_backward(dim, dtype)


def winners() -> dict[str, Any]:
    """What `tune` found on this device, as JSON."""
    return {
        "forward": {key: asdict(config) for key, config in FORWARD.items()},
        "backward": {key: [asdict(config) for config in pair] for key, pair in BACKWARD.items()},
    }


def use_winners(rows: Mapping[str, Any]) -> None:
    """Take over what `winners` gave on the same kind of device."""
    FORWARD.update({key: ForwardConfig(**fields) for key, fields in rows["forward"].items()})
    BACKWARD.update(
        {key: (BackwardConfig(**one), BackwardConfig(**two)) for key, (one, two) in rows["backward"].items()}
    )
