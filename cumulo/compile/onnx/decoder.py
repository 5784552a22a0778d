"""A decoder as one ONNX graph, for a prompt and every token after it: the KV cache goes in and comes out longer.
Called by `cumulo compile onnx`. Plain operators of opset 18, so that any runtime can play it.

Inputs: token_ids [batch, new], past_key_N and past_value_N [batch, kv_heads, past, head_dim]; outputs: logits
[batch, new, vocabulary], key_N and value_N [batch, kv_heads, past + new, head_dim].
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from cumulo.errors import ModelError
from cumulo.models.decoder import Decoder
from cumulo.models.rope import inverse_frequencies, rotation_magnitude
from cumulo.spec.model import ModelSpec

if TYPE_CHECKING:
    import onnx

OPSET = 18
FILE = "model.onnx"
MISSING = "exporting needs onnx and onnxruntime: pip install 'cumulo[onnx]'"
_LOWEST = -3.0e38  # the score of a key that a query must not see


def export_decoder(decoder: Decoder, folder: Path, tell: Callable[[str], None] = lambda _: None) -> Path:
    """Write model.onnx, and its weights beside it, into the folder; the file is valid by onnx's own checker."""
    try:
        import onnx
    except ImportError:
        raise ModelError(MISSING) from None
    refuse_what_is_not_exported(decoder.spec)
    model = _Graph(decoder).model()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    for old in (path, path.with_suffix(".onnx.data")):
        old.unlink(missing_ok=True)  # weights would be appended
    tell("writing")
    onnx.save_model(model, path, save_as_external_data=True, location=f"{FILE}.data", size_threshold=1024)
    tell("checking")
    onnx.checker.check_model(str(path), full_check=True)
    return path


def refuse_what_is_not_exported(spec: ModelSpec) -> None:
    reasons = {
        "routed experts": spec.moe is not None,
        "latent attention": spec.mla is not None,
    }
    if found := [name for name, there in reasons.items() if there]:
        raise ModelError(
            f"a decoder of family {spec.family} has {' and '.join(found)}, which is not exported yet"
        )


class _Graph:
    """Nodes in the order in which they compute, and weights by their parameter's name."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.spec = decoder, decoder.spec
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.known: set[str] = set()

    # -- pieces ---------------------------------------------------------------------------------------------------
    def add(self, kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        import onnx

        self.nodes.append(onnx.helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: np.ndarray[Any, Any] | float | list[int], name: str = "") -> str:
        """A float is one number of float32; a list, whole numbers such as sizes and axes."""
        import onnx

        array = np.asarray(value, np.int64 if isinstance(value, list) else None)
        if isinstance(value, list):
            name = name or "ints_" + "_".join(map(str, value)).replace("-", "m")
        elif isinstance(value, float):
            array, name = array.astype(np.float32), name or f"number_{value:.6g}"
        if name not in self.known:
            self.known.add(name)
            self.weights.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def weight(self, name: str, transposed: bool = False) -> str:
        module, _, attribute = name.rpartition(".")
        owner = self.decoder.get_submodule(module)
        tensor: Tensor = getattr(owner, attribute)
        array = tensor.detach().float().numpy()
        return self.constant(array.T if transposed else array, f"{name}.T" if transposed else name)

    def linear(self, x: str, name: str, out: str) -> str:
        y = self.add("MatMul", out, x, self.weight(f"{name}.weight", transposed=True))
        if getattr(self.decoder.get_submodule(name), "bias", None) is not None:
            y = self.add("Add", f"{out}.biased", y, self.weight(f"{name}.bias"))
        return y

    def norm(self, x: str, name: str, out: str) -> str:
        eps = float(self.decoder.get_submodule(name).eps)  # type: ignore[arg-type]
        square = self.add("Mul", f"{out}.square", x, x)
        mean = self.add("ReduceMean", f"{out}.mean", square, self.constant([-1]), keepdims=1)
        shifted = self.add("Add", f"{out}.shifted", mean, self.constant(eps))
        root = self.add("Sqrt", f"{out}.root", shifted)
        scaled = self.add("Div", f"{out}.scaled", x, root)
        return self.add("Mul", out, scaled, self.weight(f"{name}.weight"))

    def rotated(self, x: str, out: str) -> str:
        """[batch, heads, new, dim], by halves or by neighbours."""
        half = self.spec.rope_dim // 2
        if self.spec.rope_interleaved:
            pairs = self.add("Reshape", f"{out}.pairs", x, self.constant([0, 0, 0, half, 2]))
            first, second = f"{out}.first5", f"{out}.second5"
            self.split(pairs, (first, second), [1, 1], 4)
            first = self.add("Squeeze", f"{out}.first", first, self.constant([-1]))
            second = self.add("Squeeze", f"{out}.second", second, self.constant([-1]))
        else:
            first, second = f"{out}.first", f"{out}.second"
            self.split(x, (first, second), [half, half], 3)
        parts = []
        for name, one, other, sign in (("left", first, second, "Sub"), ("right", second, first, "Add")):
            turned = self.add("Mul", f"{out}.{name}.cosine", one, "cosine")
            against = self.add("Mul", f"{out}.{name}.sine", other, "sine")
            parts.append(self.add(sign, f"{out}.{name}", turned, against))
        if not self.spec.rope_interleaved:
            return self.add("Concat", out, *parts, axis=3)
        parts = [self.add("Unsqueeze", f"{one}5", one, self.constant([-1])) for one in parts]
        joined = self.add("Concat", f"{out}.joined", *parts, axis=4)
        return self.add("Reshape", out, joined, self.constant([0, 0, 0, 2 * half]))

    def split(self, x: str, outputs: tuple[str, ...], sizes: list[int], axis: int) -> None:
        import onnx

        node = onnx.helper.make_node("Split", [x, self.constant(sizes)], list(outputs), outputs[0], axis=axis)
        self.nodes.append(node)

    # -- the model ------------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Positions, their angles, and which keys each new token sees."""
        spec = self.spec
        new = self.add("Shape", "new", "token_ids", start=1, end=2)
        past = self.add("Shape", "past", "past_key_0", start=2, end=3)
        total = self.add("Add", "total", past, new)
        zero, one = self.constant(np.array(0), "zero"), self.constant(np.array(1), "one")
        scalar = self.constant([0])
        first = self.add("Squeeze", "first_position", past, scalar)
        end = self.add("Squeeze", "end_position", total, scalar)
        positions = self.add("Range", "positions", first, end, one)
        keys = self.add("Range", "key_positions", zero, end, one)
        row = self.add("Unsqueeze", "query_row", positions, self.constant([1]))
        column = self.add("Unsqueeze", "key_column", keys, self.constant([0]))
        distance = self.add("Sub", "distance", row, column)
        ahead = self.add("Less", "ahead", distance, zero)
        low, nothing = self.constant(_LOWEST, "lowest"), self.constant(0.0)
        self.add("Where", "mask", ahead, low, nothing)
        if spec.sliding_window is not None:
            window = self.constant(np.array(spec.sliding_window), "window")
            behind = self.add("GreaterOrEqual", "behind", distance, window)
            hidden = self.add("Or", "outside", ahead, behind)
            self.add("Where", "windowed_mask", hidden, low, nothing)
        floats = self.add("Cast", "float_positions", row, to=1)
        frequencies = self.constant(inverse_frequencies(spec).numpy()[None, :], "inverse_frequencies")
        angles = self.add("Mul", "angles", floats, frequencies)
        magnitude = rotation_magnitude(spec)
        for kind, name in (("Cos", "cosine"), ("Sin", "sine")):
            plain = self.add(kind, name if magnitude == 1.0 else f"{name}.plain", angles)
            if magnitude != 1.0:
                self.add("Mul", name, plain, self.constant(float(magnitude)))

    def attention(self, x: str, layer: int) -> str:
        spec, at = self.spec, f"layers.{layer}.attention"
        heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
        joined = self.linear(x, f"{at}.qkv", f"{at}.qkv")
        states = self.add("Reshape", f"{at}.states", joined, self.constant([0, 0, heads + 2 * kv_heads, dim]))
        by_head = self.add("Transpose", f"{at}.by_head", states, perm=[0, 2, 1, 3])
        query, key, value = f"{at}.query", f"{at}.key", f"{at}.value"
        self.split(by_head, (query, key, value), [heads, kv_heads, kv_heads], 1)
        if spec.qk_norm:
            query = self.norm(query, f"{at}.q_norm", f"{at}.query.normed")
            key = self.norm(key, f"{at}.k_norm", f"{at}.key.normed")
        query, key = self.rotated(query, f"{at}.query.rotated"), self.rotated(key, f"{at}.key.rotated")
        keys = self.add("Concat", f"key_{layer}", f"past_key_{layer}", key, axis=2)
        values = self.add("Concat", f"value_{layer}", f"past_value_{layer}", value, axis=2)
        # Query heads of one key head are rows of one product, so that keys are not repeated in memory.
        group = heads // kv_heads
        grouped = self.add("Reshape", f"{at}.grouped", query, self.constant([0, kv_heads, group, -1, dim]))
        keys5 = self.add("Unsqueeze", f"{at}.keys5", keys, self.constant([2]))
        turned = self.add("Transpose", f"{at}.keys.T", keys5, perm=[0, 1, 2, 4, 3])
        scores = self.add("MatMul", f"{at}.products", grouped, turned)
        scaled = self.add("Mul", f"{at}.scores", scores, self.constant(float(dim**-0.5)))
        mask = "windowed_mask" if spec.window_of_layer(layer) is not None else "mask"
        masked = self.add("Add", f"{at}.masked", scaled, mask)
        shares = self.add("Softmax", f"{at}.shares", masked, axis=-1)
        values5 = self.add("Unsqueeze", f"{at}.values5", values, self.constant([2]))
        mixed = self.add("MatMul", f"{at}.mixed", shares, values5)
        flat = self.add("Reshape", f"{at}.heads", mixed, self.constant([0, heads, -1, dim]))
        back = self.add("Transpose", f"{at}.by_token", flat, perm=[0, 2, 1, 3])
        return self.linear(
            self.add("Reshape", f"{at}.flat", back, self.constant([0, 0, heads * dim])),
            f"{at}.output",
            f"{at}.out",
        )

    def feed_forward(self, x: str, layer: int) -> str:
        at = f"layers.{layer}.ffn"
        joined = self.linear(x, f"{at}.gate_up", f"{at}.gate_up")
        gate, up = f"{at}.gate", f"{at}.up"
        width = self.spec.ffn_hidden
        self.split(joined, (gate, up), [width, width], 2)
        sigmoid = self.add("Sigmoid", f"{at}.sigmoid", gate)
        silu = self.add("Mul", f"{at}.silu", gate, sigmoid)
        return self.linear(self.add("Mul", f"{at}.product", silu, up), f"{at}.down", f"{at}.out")

    def model(self) -> "onnx.ModelProto":
        import onnx

        spec = self.spec
        self.prepare()
        x = self.add("Gather", "embedded", self.weight("embed.weight"), "token_ids", axis=0)
        for layer in range(spec.layers):
            at = f"layers.{layer}"
            normed = self.norm(x, f"{at}.attention_norm", f"{at}.attention_normed")
            x = self.add("Add", f"{at}.after_attention", x, self.attention(normed, layer))
            normed = self.norm(x, f"{at}.ffn_norm", f"{at}.ffn_normed")
            x = self.add("Add", f"{at}.after_ffn", x, self.feed_forward(normed, layer))
        last = self.norm(x, "final_norm", "final_normed")
        if spec.tied_embeddings:  # the file has it once
            head = self.add("Transpose", "embed.weight.T", "embed.weight", perm=[1, 0])
        else:
            head = self.weight("head.weight", transposed=True)
        self.add("MatMul", "logits", last, head)
        kind, whole = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
        declare = onnx.helper.make_tensor_value_info
        cache: list[str | int | None] = ["batch", spec.kv_heads, "past", spec.head_dim]
        longer: list[str | int | None] = ["batch", spec.kv_heads, "past + new", spec.head_dim]
        inputs = [declare("token_ids", whole, ["batch", "new"])]
        outputs = [declare("logits", kind, ["batch", "new", spec.vocab_size])]
        for layer in range(spec.layers):
            inputs += [declare(f"past_{name}_{layer}", kind, cache) for name in ("key", "value")]
            outputs += [declare(f"{name}_{layer}", kind, longer) for name in ("key", "value")]
        graph = onnx.helper.make_graph(self.nodes, f"cumulo {spec.family}", inputs, outputs, self.weights)
        made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
        made.ir_version = 9  # of the same time as the opset: older runtimes read it
        made.producer_name = "cumulo"
        return made
