"""How one element of an aten operation is computed in Triton: a table of operations, and the casts around them.

The writer of kernels calls `write`. Registers hold half-precision numbers as float32, rounded after each operation
as eager PyTorch rounds its results; integers wrap and NaN spreads as in PyTorch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from cumulo.compile.passes.facts import aten_name, fake, tensor


class CannotWrite(Exception):
    """Why this is not written as Triton code."""


TYPES = {
    torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.bool: "int1",
    torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64", torch.uint8: "uint8",
}  # fmt: skip
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class KernelValue:
    """A variable or an expression of the kernel, and the type its numbers have in PyTorch."""

    text: str
    dtype: torch.dtype


def register(dtype: torch.dtype) -> str:
    return "float32" if dtype in HALVES else TYPES[dtype]


def cast(value: KernelValue, dtype: torch.dtype) -> str:
    """The value as a register of this type, not yet rounded to it."""
    if dtype in HALVES and value.dtype != dtype:
        return rounded(value.text if value.dtype in HALVES else f"{value.text}.to(tl.float32)", dtype)
    if register(value.dtype) == register(dtype):
        return value.text
    if dtype == torch.bool:
        return f"({value.text} != 0)"
    if value.dtype.is_floating_point and dtype == torch.uint8:
        raise CannotWrite("a negative float has no agreed value as uint8")
    return f"{value.text}.to(tl.{register(dtype)})"


def rounded(text: str, dtype: torch.dtype) -> str:
    if dtype in HALVES:
        return f"({text}).to(tl.{TYPES[dtype]}).to(tl.float32)"
    return f"({text}).to(tl.{TYPES[dtype]})" if not dtype.is_floating_point and dtype != torch.bool else text


def literal(number: Any, dtype: torch.dtype) -> str:
    """A Python number as a constant of this type."""
    if dtype.is_floating_point:
        number = float(number)
        return f'float("{number}")' if math.isinf(number) or math.isnan(number) else f"({number!r})"
    if isinstance(number, float) or not isinstance(number, (int, bool)):
        raise CannotWrite(f"{number} is no constant of {dtype}")
    if dtype == torch.bool:
        return "(1 != 0)" if number else "(1 == 0)"
    limits = torch.iinfo(dtype)
    if not limits.min <= number <= limits.max:
        raise CannotWrite(f"{number} does not fit {dtype}")
    return f"({number})"


# Templates over a, b, c: arguments cast to the type they are computed in.
_ARITHMETIC = {"add": "({a} + {b})", "sub": "({a} - {b})", "mul": "({a} * {b})", "rsub": "({b} - {a})"}
_MAXIMUM = "tl.where({a} != {a}, {a}, tl.where({a} > {b}, {a}, {b}))"
_MINIMUM = "tl.where({a} != {a}, {a}, tl.where({a} < {b}, {a}, {b}))"
_FLOAT = {
    "div": "({a} / {b})", "reciprocal": "(1.0 / {a})", "sqrt": "tl.sqrt({a})", "rsqrt": "tl.rsqrt({a})",
    "exp": "tl.exp({a})", "log": "tl.log({a})", "exp2": "tl.exp2({a})", "log2": "tl.log2({a})",
    "sin": "tl.sin({a})", "cos": "tl.cos({a})", "erf": "tl.erf({a})", "sigmoid": "tl.sigmoid({a})",
    "silu": "({a} * tl.sigmoid({a}))",
    "silu_backward": "({a} * tl.sigmoid({b}) * (1.0 + {b} * (1.0 - tl.sigmoid({b}))))",
    "sigmoid_backward": "({a} * (1.0 - {b}) * {b})", "tanh_backward": "({a} * (1.0 - {b} * {b}))",
}  # fmt: skip
_ANY = {
    "neg": "(-{a})", "abs": "tl.abs({a})", "relu": "tl.where({a} <= 0, 0, {a})",
    "maximum": _MAXIMUM, "minimum": _MINIMUM,
    "square": "({a} * {a})", "clone": "{a}", "_to_copy": "{a}", "contiguous": "{a}",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_LOGIC = {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}
_OTHER = {
    "where", "masked_fill", "clamp", "clamp_min", "clamp_max", "pow", "tanh", "gelu", "gelu_backward",
    "threshold_backward", "logical_not", "bitwise_not", "addcmul", "isnan",
}  # fmt: skip
POINTWISE = {*_ARITHMETIC, *_FLOAT, *_ANY, *_COMPARE, *_BITS, *_LOGIC, *_OTHER}


REDUCTIONS = {"sum", "mean", "amax", "amin", "_softmax", "_log_softmax", "_softmax_backward_data",
              "_log_softmax_backward_data"}  # fmt: skip
CONSTANTS = {"full", "zeros", "ones", "scalar_tensor"}
INSETS = {"slice_scatter", "constant_pad_nd", "slice_backward", "select_backward"}
FUSABLE = POINTWISE | REDUCTIONS | {"cat", "arange", "roll"} | INSETS


def reduced_dims(node: Node) -> tuple[int, ...]:
    """The dimensions that a reduction takes together, which must be the last ones."""
    name, args = aten_name(node), tuple[Any, ...](node.args)
    dims = fake(args[0]).dim()
    if name in ("_softmax", "_log_softmax"):
        given = [args[1]]
    elif name.endswith("_backward_data"):
        given = [args[2]]
    else:
        given = list(args[1] or ()) if len(args) > 1 else []
    found = sorted(dim % dims for dim in given or range(dims)) if dims else []
    if not found or found != list(range(dims - len(found), dims)):
        raise CannotWrite("it reduces over other than the last dimensions")
    return tuple(found)


def is_constant(node: Node) -> bool:
    return aten_name(node) in CONSTANTS and not node.all_input_nodes


def keeps_shape(node: Node) -> bool:
    """Whether a reduction gives a number for each element of its row, as softmax does."""
    return aten_name(node).startswith("_")


def write(node: Node, argument: Callable[[Any], KernelValue | None]) -> str:
    """The expression of a node's element. `argument`: an argument's value; None for a Python number."""
    name, value = aten_name(node), tensor(node)
    assert value is not None
    out = value.dtype

    def given(place: int, dtype: torch.dtype) -> str:
        one = node.args[place]
        found = argument(one)
        return literal(one, dtype) if found is None else cast(found, dtype)

    def filled(template: str, dtype: torch.dtype) -> str:
        return rounded(
            template.format(
                **{letter: given(place, dtype) for place, letter in enumerate("abc") if place < count}
            ),
            out,
        )

    count = len([one for one in node.args if isinstance(one, (Node, int, float))])
    if name in _ARITHMETIC:
        alpha = node.kwargs.get("alpha", node.args[2] if name == "rsub" and len(node.args) > 2 else 1)
        if alpha != 1:
            raise CannotWrite("alpha is not 1")
        if out == torch.bool:
            logic = {"add": "({a} | {b})", "mul": "({a} & {b})"}.get(name)
            if logic is None:
                raise CannotWrite("bool is not subtracted")
            return filled(logic, out)
        return filled(_ARITHMETIC[name], out)
    if name in _FLOAT:
        if node.kwargs or not out.is_floating_point:
            raise CannotWrite(f"{name} with an option")
        return filled(_FLOAT[name], out)
    if name in _ANY:
        if out == torch.bool and name not in ("clone", "_to_copy", "contiguous"):
            raise CannotWrite(f"{name} of bool")
        if name in ("clone", "_to_copy", "contiguous"):
            source = tensor(node.args[0])
            if source is None or source.device != value.device:
                raise CannotWrite("a copy between devices")
            return rounded(given(0, out), out)
        return filled(_ANY[name], out)
    if name in _COMPARE:
        dtype = _promoted(node)
        dtype = torch.int32 if dtype == torch.bool else dtype
        return f"({given(0, dtype)} {_COMPARE[name]} {given(1, dtype)})"
    if name in _BITS:
        return rounded(f"({given(0, out)} {_BITS[name]} {given(1, out)})", out)
    if name in _LOGIC:
        return f"({given(0, torch.bool)} {_LOGIC[name]} {given(1, torch.bool)})"
    return rounded(_other(name, node, out, given), out)


def _other(name: str, node: Node, out: torch.dtype, given: Callable[[int, torch.dtype], str]) -> str:
    if name == "where" and len(node.args) == 3:
        return f"tl.where({given(0, torch.bool)}, {given(1, out)}, {given(2, out)})"
    if name == "masked_fill":
        return f"tl.where({given(1, torch.bool)}, {given(2, out)}, {given(0, out)})"
    if name == "logical_not":
        return f"({given(0, torch.bool)} == 0)"
    if name == "bitwise_not":
        return f"({given(0, out)} == 0)" if out == torch.bool else f"(~{given(0, out)})"
    if name == "isnan":
        dtype = tensor(node.args[0]).dtype  # type: ignore[union-attr]
        return f"({given(0, dtype)} != {given(0, dtype)})"
    if name in ("clamp", "clamp_min", "clamp_max") and not node.kwargs and out != torch.bool:
        bounds = [*node.args[1:]]
        low = None if name == "clamp_max" or bounds[0] is None else 1
        high = 1 if name == "clamp_max" else 2 if len(bounds) > 1 and bounds[1] is not None else None
        text = given(0, out)
        if low is not None:
            text = f"tl.where({text} < {given(low, out)}, {given(low, out)}, {text})"
        if high is not None:
            text = f"tl.where({text} > {given(high, out)}, {given(high, out)}, {text})"
        if any(isinstance(one, Node) for one in bounds):
            raise CannotWrite("clamp with tensors as bounds")  # their NaN spreads too
        return text
    if name == "pow" and out.is_floating_point and isinstance(node.args[1], (int, float)):
        a = given(0, out)
        known = {
            2: f"({a} * {a})", 3: f"({a} * {a} * {a})", 0.5: f"tl.sqrt({a})", -0.5: f"tl.rsqrt({a})",
            -1: f"(1.0 / {a})", -2: f"(1.0 / ({a} * {a}))", 1: a,
        }  # fmt: skip
        if node.args[1] in known:
            return known[node.args[1]]
        raise CannotWrite(f"the power {node.args[1]}")
    if name == "tanh" and out.is_floating_point:
        return _tanh(given(0, out))
    if name in ("gelu", "gelu_backward"):
        x = given(0 if name == "gelu" else 1, out)
        half = f"(0.5 * (1.0 + tl.erf({x} * 0.7071067811865476)))"
        inner = f"(0.7978845608028654 * ({x} + 0.044715 * {x} * {x} * {x}))"
        smooth = node.kwargs.get("approximate", node.args[-1] if isinstance(node.args[-1], str) else "none")
        if smooth == "tanh":
            t = _tanh(inner)
            if name == "gelu":
                return f"(0.5 * {x} * (1.0 + {t}))"
            slope = f"(0.7978845608028654 * (1.0 + 0.134145 * {x} * {x}))"
            return f"({given(0, out)} * (0.5 * (1.0 + {t}) + 0.5 * {x} * (1.0 - {t} * {t}) * {slope}))"
        if name == "gelu":
            return f"({x} * {half})"
        bell = f"(tl.exp(-0.5 * {x} * {x}) * 0.3989422804014327)"
        return f"({given(0, out)} * ({half} + {x} * {bell}))"
    if name == "threshold_backward":
        return f"tl.where({given(1, out)} <= {given(2, out)}, 0, {given(0, out)})"
    if name == "addcmul" and not node.kwargs:
        return f"({given(0, out)} + {given(1, out)} * {given(2, out)})"
    raise CannotWrite(f"this form of {name}")


def _tanh(x: str) -> str:
    """Triton has none for every target. Near zero the quotient would cancel; its series does not."""
    t = f"tl.exp(-2.0 * tl.abs({x}))"
    far = f"tl.where({x} < 0, -1.0, 1.0) * ((1.0 - {t}) / (1.0 + {t}))"
    near = f"({x} * (1.0 - {x} * {x} * (0.3333333333333333 - {x} * {x} * 0.13333333333333333)))"
    return f"tl.where(tl.abs({x}) < 0.1, {near}, {far})"


def _promoted(node: Node) -> torch.dtype:
    pair: list[Any] = [tensor(one) if isinstance(one, Node) else one for one in node.args[:2]]
    return torch.result_type(*pair)
