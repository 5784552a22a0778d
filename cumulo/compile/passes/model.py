"""`compile_model`: a model through backend="cumulo" and back as a report: graphs, reasons, breaks, predicted next
to measured time. `cumulo compile model` calls it for the built-in model, a model's files, or FILE.py:NAME."""

import importlib.util
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import get_compilation_metrics

from cumulo.base.nearest import did_you_mean
from cumulo.compile.passes.compiler import cumulo, recording
from cumulo.compile.passes.report import Break, CompileReport, Speed
from cumulo.errors import ConfigError, ModelError
from cumulo.models.attention import Attention
from cumulo.models.decoder import Decoder, Layer
from cumulo.models.files.load import load_model

RUNS = 5


class UncachedDecoder(nn.Module):
    """A decoder over whole sequences [B, T] without a cache, as a training step or a long prompt runs it."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if decoder.spec.mla is not None:
            raise ModelError("models with latent attention are not compiled; name one with plain attention")
        self.decoder = decoder.requires_grad_()
        decoder.rotary.rotation_at(decoder.embed.weight.new_zeros(1, dtype=torch.int64))  # makes its table

    def forward(self, token_ids: Tensor) -> Tensor:
        decoder, (batch, length) = self.decoder, token_ids.shape
        x = decoder.embed.rows(token_ids.flatten())
        rotation = decoder.rotary.rotation_at(torch.arange(length, device=x.device).repeat(batch))
        for layer in decoder.layers:
            assert isinstance(layer, Layer) and isinstance(layer.attention, Attention)
            attention = layer.attention
            query, key, value = (
                one.unflatten(0, (batch, length)).transpose(1, 2)
                for one in attention.project(layer.attention_norm(x), rotation)
            )
            several = query.shape[1] != key.shape[1]
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=attention.scale, enable_gqa=several
            )
            x = x + attention.output(mixed.transpose(1, 2).flatten(2).flatten(0, 1))
            x = x + layer.ffn(layer.ffn_norm(x))
        logits: Tensor = decoder.logits(decoder.final_norm(x))
        return logits.view(batch, length, -1)


def compile_model(
    source: str | Callable[..., Any] | None = None,
    inputs: Sequence[tuple[Any, ...]] = (),
    *,
    training: bool = False,
    tokens: int = 128,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> CompileReport:
    """Compile and run a model: None is the built-in one; a folder, a GGUF file or a name as for `cumulo serve`; a
    function or class as FILE.py:NAME; or the callable itself. `inputs`: the arguments of several calls, in turn;
    `options` are the backend's."""
    model, calls, name = _open(source, inputs, tokens, dtype, device)
    step = _training_step(model) if training else torch.no_grad()(model)
    breaks = _graph_breaks(model, calls[0])
    torch._dynamo.reset()
    known = len(get_compilation_metrics())
    compiled = torch.compile(model, backend=cumulo, options=options)
    run = _training_step(compiled) if training else torch.no_grad()(compiled)
    with recording() as graphs:
        begun = time.perf_counter()
        pairs = [(step(*call), run(*call)) for call in calls]
        first_s = time.perf_counter() - begun
    metrics = get_compilation_metrics()[known:]
    recompiles = tuple(str(one.recompile_reason) for one in metrics if getattr(one, "recompile_reason", None))
    worst = max((_difference(one, other) for one, other in pairs), default=0.0)
    speed = Speed(_seconds(step, calls[0], device), _seconds(run, calls[0], device), first_s)
    return CompileReport(name, device, tuple(graphs), breaks, recompiles, worst, speed, *_pace(dtype, device))


def _open(
    source: str | Callable[..., Any] | None, inputs: Sequence[tuple[Any, ...]], tokens: int, dtype: torch.dtype,
    device: str,
) -> tuple[Callable[..., Any], Sequence[tuple[Any, ...]], str]:  # fmt: skip
    if callable(source):
        if not inputs:
            raise ConfigError("a model needs inputs=[(tensor, ...)], the arguments it is called with")
        return source, inputs, getattr(source, "__name__", type(source).__name__)
    if source is not None and ".py:" in source:
        path, _, name = source.rpartition(":")
        model, calls = _users(Path(path), name)
        return model.to(device) if isinstance(model, nn.Module) else model, inputs or calls, source
    loaded = load_model(source, dtype=dtype, device=device, keep_quantised=False, with_tokenizer=False)
    model = UncachedDecoder(loaded.decoder)
    most = min(tokens, loaded.spec.max_context)
    ids = torch.randint(0, loaded.spec.vocab_size, (1, most), device=device)
    return model, inputs or [(ids,)], loaded.name


def _users(path: Path, name: str) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """A function or class of a user's file, and what its `example_inputs()` gives."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file; name a model as FILE.py:NAME")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if found is None:
            names = [
                one for one in vars(module) if callable(getattr(module, one)) and not one.startswith("_")
            ]
            raise ConfigError(f"{path} has no {name!r}{did_you_mean(name, names)}")
        model = found() if isinstance(found, type) else found
        make = getattr(model, "example_inputs", None) or getattr(module, "example_inputs", None)
        if make is None:
            raise ConfigError(
                f"{path} does not say what {name} is called with: add a function example_inputs() that returns its "
                f"arguments as a tuple, or a list of such tuples for several calls"
            )
        given = make()
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's file raises
        raise ConfigError(_where(error, path)) from error
    return model, [
        one if isinstance(one, tuple) else (one,) for one in (given if isinstance(given, list) else [given])
    ]


def _where(error: Exception, path: Path) -> str:
    frames = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename) == path]
    line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
    return f"{path}{f', line {line}' if line else ''}: {type(error).__name__}: {error}"


def _training_step(model: Callable[..., Any]) -> Callable[..., Any]:
    """Forward and backward of the mean of what it gives; returns results and gradients."""

    def step(*inputs: Any) -> list[Tensor]:
        outputs = _tensors(model(*inputs))
        graded = [one for one in outputs if one.requires_grad]
        module = getattr(model, "_orig_mod", model)
        parameters = module.parameters() if isinstance(module, nn.Module) else ()
        given = [one for one in inputs if isinstance(one, Tensor)]
        leaves: list[Tensor] = [one for one in (*parameters, *given) if one.requires_grad]
        if not graded or not leaves:
            raise ConfigError("nothing to train: no result of the model has a gradient; leave out training")
        loss = sum(one.float().square().mean() for one in graded)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)  # type: ignore[arg-type]
        return [*(one.detach() for one in outputs), *(one for one in gradients if one is not None)]

    return step


def _tensors(result: Any) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [one for one in leaves if isinstance(one, Tensor)]


def _difference(one: Any, other: Any) -> float:
    """The largest difference of two results, against the largest number of its tensor."""
    worst = 0.0
    for left, right in zip(_tensors(one), _tensors(other), strict=True):
        if left.numel():
            scale = left.float().abs().max().clamp(min=1e-6)
            worst = max(worst, float((left.float() - right.float()).abs().max() / scale))
    return worst


def _graph_breaks(model: Callable[..., Any], call: tuple[Any, ...]) -> tuple[Break, ...]:
    explained = torch._dynamo.explain(model)(*call)
    breaks = []
    for one in explained.break_reasons:
        if not getattr(one, "graph_break", True):
            continue  # the function's own return
        stack = list(one.user_stack)
        where = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else ""
        breaks.append(
            Break(str(one.reason).strip().splitlines()[0], where, (stack[-1].line or "") if stack else "")
        )
    return tuple(breaks)


def _seconds(run: Callable[..., Any], call: tuple[Any, ...], device: str) -> float:
    took = []
    for _ in range(RUNS):
        _wait(device)
        begun = time.perf_counter()
        run(*call)
        _wait(device)
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _pace(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Bytes and FLOPs a second of this device, from a copy and a matrix product: what predictions rest on."""
    many = torch.empty(1 << 24, dtype=torch.float32, device=device)
    matrix = torch.randn(1024, 1024, dtype=dtype, device=device)
    target = torch.empty_like(many)
    copied = _seconds(target.copy_, (many,), device)
    multiplied = _seconds(torch.mm, (matrix, matrix), device)
    return 2 * many.nbytes / copied, 2 * 1024**3 / multiplied
