"""What an ONNX file computes, operator by operator in its order: shapes, FLOPs, bytes, the memory of what is alive,
and chains of operators that could be one kernel. Called by `cumulo compile onnx`, for any file.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cumulo.compile.onnx.decoder import MISSING
from cumulo.errors import ModelError

if TYPE_CHECKING:
    import onnx

_PRODUCTS = ("MatMul", "Gemm", "Conv")
# Operators that compute each element by itself, which a runtime can do while it has the element.
_POINTWISE = {
    "Abs", "Add", "And", "Cast", "Clip", "Cos", "Div", "Erf", "Exp", "Gelu", "GreaterOrEqual", "Less", "Max", "Min",
    "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Sigmoid", "Sin", "Softplus", "Sqrt", "Sub", "Tanh",
    "Where",
}  # fmt: skip
# The bytes stay where they are.
_FREE = {"Constant", "Identity", "Reshape", "Shape", "Squeeze", "Unsqueeze"}


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    kind: str
    shape: tuple[int, ...]  # of its first output; empty also where it is not known
    flops: float
    read_bytes: int
    written_bytes: int
    alive_bytes: int  # activations that are held while it computes


@dataclass(frozen=True, slots=True)
class FusionCandidate:
    """Operators that follow one another and could be one kernel."""

    kinds: tuple[str, ...]
    first: str
    count: int  # such chains in the file
    saved_bytes: int  # intermediate results that would not travel, of all of them


@dataclass(frozen=True, slots=True)
class Inspection:
    operators: list[Operator]
    candidates: list[FusionCandidate]
    weight_bytes: int
    unknown_shapes: int

    @property
    def peak(self) -> Operator:
        return max(self.operators, key=lambda one: one.alive_bytes)


def inspect(path: Path, sizes: Mapping[str, int]) -> Inspection:
    """`sizes`: numbers for the names of input dimensions, such as batch, new and past."""
    try:
        import onnx
    except ImportError:
        raise ModelError(MISSING) from None
    try:
        model = onnx.load(str(path), load_external_data=False)
        onnx.checker.check_model(str(path))
    except Exception as error:  # protobuf, checker and file errors have no common base
        raise ModelError(f"{path} is no valid ONNX file: {str(error).strip().splitlines()[0]}") from None
    weights = {one.name: _tensor_bytes(one.dims, one.data_type) for one in model.graph.initializer}
    _fix_inputs(model, sizes, set(weights))
    _leave_weights_outside(model)
    shapes, types = _inferred(model)
    nodes = list(model.graph.node)
    operators = list(_operators(nodes, shapes, types, weights, {one.name for one in model.graph.output}))
    unknown = sum(name not in shapes for node in nodes for name in node.output if name)
    return Inspection(operators, _candidates(nodes, shapes, types, model), sum(weights.values()), unknown)


def _fix_inputs(model: "onnx.ModelProto", sizes: Mapping[str, int], weights: set[str]) -> None:
    missing: dict[str, None] = {}
    for one in model.graph.input:
        for dimension in one.type.tensor_type.shape.dim if one.name not in weights else ():
            if dimension.dim_param:
                if dimension.dim_param in sizes:
                    dimension.dim_value = sizes[dimension.dim_param]
                else:
                    missing[dimension.dim_param] = None
    if missing:
        told = " ".join(f"--set {name}=NUMBER" for name in missing)
        raise ModelError(f"the file's inputs have sizes without a number: {told}")


def _leave_weights_outside(model: "onnx.ModelProto") -> None:
    """Weights that lie in another file become inputs: only their shapes matter here."""
    import onnx

    outside = [one for one in model.graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL]
    for one in outside:
        model.graph.input.append(onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims))
        model.graph.initializer.remove(one)


def _inferred(model: "onnx.ModelProto") -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Shapes and types of all values, as onnxruntime's own tool follows them through shape arithmetic."""
    try:
        from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference
    except ImportError:
        raise ModelError(MISSING) from None
    for one in model.graph.output:
        one.type.tensor_type.ClearField("shape")  # its names would stand against the numbers
    try:
        done = SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    except Exception as error:  # it raises what it likes
        raise ModelError(f"the file's shapes cannot be inferred: {error}") from None
    shapes, types = dict[str, tuple[int, ...]](), dict[str, int]()
    for held in done.graph.initializer:
        shapes[held.name], types[held.name] = tuple(held.dims), held.data_type
    for one in (*done.graph.input, *done.graph.value_info, *done.graph.output):
        dimensions = one.type.tensor_type.shape.dim
        if one.type.tensor_type.HasField("shape") and all(it.HasField("dim_value") for it in dimensions):
            shapes[one.name] = tuple(it.dim_value for it in dimensions)
        types[one.name] = one.type.tensor_type.elem_type
    return shapes, types


def _tensor_bytes(shape: Sequence[int], kind: int) -> int:
    import onnx

    return math.prod(shape) * int(onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize)


def _operators(
    nodes: list[Any], shapes: dict[str, tuple[int, ...]], types: dict[str, int], weights: dict[str, int],
    kept: set[str],
) -> Iterator[Operator]:  # fmt: skip
    def size(name: str) -> int:
        return _tensor_bytes(shapes[name], types[name]) if name in shapes and types.get(name) else 0

    constant = set(weights)  # and what is made of them alone, once, when the file is loaded
    last = {name: at for at, node in enumerate(nodes) for name in node.input}
    alive: dict[str, int] = {}
    for at, node in enumerate(nodes):
        if made_once := all(name in constant for name in node.input if name):
            constant.update(node.output)
        free = made_once or node.op_type in _FREE
        for name in node.output:
            alive[name] = 0 if free else size(name)
        told = sum(alive.values())
        read = (
            node.output if node.op_type == "Gather" else node.input
        )  # of a table, only the rows that are asked for
        yield Operator(
            node.name or node.output[0], node.op_type, shapes.get(node.output[0], ()), _flops(node, shapes),
            0 if free else sum(map(size, read)), 0 if free else sum(map(size, node.output)), told,
        )  # fmt: skip
        for name in node.input:
            if last.get(name) == at and name not in kept:
                alive.pop(name, None)


def _flops(node: Any, shapes: dict[str, tuple[int, ...]]) -> float:
    out = math.prod(shapes.get(node.output[0], (0,)))
    if node.op_type in ("MatMul", "Gemm"):
        left = shapes.get(node.input[0], (0,))
        flipped = any(one.name == "transA" and one.i for one in node.attribute)
        return 2.0 * out * (left[0] if flipped else left[-1])
    if node.op_type == "Conv":
        return 2.0 * out * math.prod(shapes.get(node.input[1], (0, 0))[1:])
    if node.op_type == "Softmax":
        return 5.0 * out
    if node.op_type.startswith("Reduce"):
        return float(math.prod(shapes.get(node.input[0], (0,))))
    return float(out) if node.op_type in _POINTWISE else 0.0


def _candidates(
    nodes: list[Any], shapes: dict[str, tuple[int, ...]], types: dict[str, int], model: Any
) -> list[FusionCandidate]:
    """Chains in which each result has one reader: a product or a reduction with what is done to each element
    around it. Equal chains are counted together."""
    readers: Counter[str] = Counter(name for node in nodes for name in node.input)
    readers.update(one.name for one in model.graph.output)
    reader = {name: node for node in nodes for name in node.input}
    taken: set[str] = set()
    chains: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for node in nodes:
        key = node.output[0]
        starts = node.op_type in _POINTWISE or node.op_type in _PRODUCTS or node.op_type.startswith("Reduce")
        if key in taken or not starts:
            continue
        chain, saved = [node], 0
        while True:
            result = chain[-1].output[0]
            follower = reader.get(result)
            if readers[result] != 1 or follower is None or follower.output[0] in taken:
                break
            if follower.op_type not in _POINTWISE and follower.op_type != "Softmax":
                break
            if result in shapes and types.get(result):
                saved += 2 * _tensor_bytes(shapes[result], types[result])
            chain.append(follower)
        if len(chain) > 1 and saved:
            taken |= {one.output[0] for one in chain}
            kinds = tuple(one.op_type for one in chain)
            chains.setdefault(kinds, []).append((chain[0].name or key, saved))
    found = [
        FusionCandidate(kinds, places[0][0], len(places), sum(saved for _, saved in places))
        for kinds, places in chains.items()
    ]
    return sorted(found, key=lambda one: -one.saved_bytes)
