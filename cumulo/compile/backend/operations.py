"""One lane of every elementwise operation as a C++ expression, and the C++ types of Triton's.

Lanes of f16, bf16 and f8 are computed as float and rounded where the operation says so: what a lane holds is always
a number of its type.
"""

import re
import struct

from cumulo.compile.backend.ttir import TtirOperation, Type

# What a lane is in a register, and what it is in memory.
_LANE = {"i1": "bool", "f32": "float", "f64": "double", "f16": "float", "bf16": "float"}
_MEMORY = {"i1": "uint8_t", "f16": "f16_t", "bf16": "bf16_t", "f8E4M3FN": "f8e4m3_t", "f8E5M2": "f8e5m2_t"}
_LANE |= {name: "float" for name in _MEMORY if name.startswith("f8")}
_LANE |= {f"i{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)}
LANE_BYTES = {"bool": 1, "int8_t": 1, "int16_t": 2, "int32_t": 4, "int64_t": 8, "float": 4, "double": 8}


def memory_type(element: str) -> str:
    if element.startswith("*"):
        return memory_type(element[1:]) + "*"
    return _MEMORY.get(element) or _LANE[element]


def lane_type(type_: Type) -> str:
    return memory_type(type_.element) if type_.is_pointer else _LANE[type_.element]


def rounded(text: str, element: str) -> str:
    return f"rounded<{_MEMORY[element]}>({text})" if element.startswith(("f8", "f16", "bf")) else text


def literal(text: str, type_: Type) -> str:
    """A constant as the printer writes it: decimal, true, or the bits of a float in hexadecimal."""
    if text in ("true", "false"):
        return text
    if not type_.is_float:
        number = int(text, 0)
        return {"i64": f"INT64_C({number})", "i1": str(bool(number)).lower()}.get(
            type_.element, f"({number})"
        )
    if text.startswith(("0x", "-0x")):
        form, integer = {4: ("e", "H"), 8: ("f", "I"), 16: ("d", "Q")}[len(text) - 2]
        if type_.element == "bf16":
            return literal(text + "0000", Type("f32"))
        number_ = struct.unpack(form, struct.pack(integer, int(text, 16)))[0]
    else:
        number_ = float(text)
    if number_ != number_:
        return "NAN"
    if abs(number_) == float("inf"):
        return "INFINITY" if number_ > 0 else "(-INFINITY)"
    return f"({float(number_).hex()}{'' if type_.element == 'f64' else 'f'})"


_BINARY = {
    "arith.addi": "+", "arith.subi": "-", "arith.muli": "*", "arith.andi": "&", "arith.ori": "|",
    "arith.xori": "^", "arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/",
    "tt.precise_divf": "/",
}  # fmt: skip
# {T}: the result's lane, {U}: unsigned, {A}: the first operand's lane
_CALLS = {
    "arith.divsi": "divided<{T}>({0}, {1})", "arith.remsi": "remainder_of<{T}>({0}, {1})",
    "arith.divui": "({T})divided<{U}>({0}, {1})", "arith.remui": "({T})remainder_of<{U}>({0}, {1})",
    "arith.ceildivsi": "ceil_div({0}, {1})", "arith.floordivsi": "floor_div({0}, {1})",
    "arith.shli": "({T})shifted_left<{U}>({0}, {1})", "arith.shrui": "({T})shifted_right<{U}>({0}, {1})",
    "arith.shrsi": "shifted_right<{T}>({0}, {1})", "arith.remf": "fmod({0}, {1})", "arith.negf": "-{0}",
    "arith.maxsi": "larger<{T}>({0}, {1})", "arith.minsi": "smaller<{T}>({0}, {1})",
    "arith.maxui": "({T})larger<{U}>({0}, {1})", "arith.minui": "({T})smaller<{U}>({0}, {1})",
    "arith.maximumf": "larger_or_nan({0}, {1})", "arith.minimumf": "smaller_or_nan({0}, {1})",
    "arith.maxnumf": "larger_number({0}, {1})", "arith.minnumf": "smaller_number({0}, {1})",
    "arith.select": "{0} ? {1} : {2}", "arith.extsi": "({T}){0}", "arith.trunci": "({T}){0}",
    "arith.extui": "({T})(unsigned_of<{A}>){0}", "arith.sitofp": "({T}){0}",
    "arith.uitofp": "({T})(unsigned_of<{A}>){0}", "arith.fptosi": "({T}){0}", "arith.fptoui": "({T})({U}){0}",
    "arith.extf": "({T}){0}", "arith.truncf": "({T}){0}", "tt.fp_to_fp": "({T}){0}",
    "arith.index_cast": "({T}){0}", "tt.int_to_ptr": "({T}){0}", "tt.ptr_to_int": "(int64_t){0}",
    "tt.mulhiui": "({T})high_product(({U}){0}, ({U}){1})", "tt.addptr": "{0} + {1}",
    "tt.clampf": "clamped({0}, {1}, {2})", "tt.precise_sqrt": "sqrt_of({0})", "math.fma": "fused({0}, {1}, {2})",
    "math.absi": "({T})({0} < 0 ? -{0} : {0})", "math.absf": "abs_of({0})", "math.rsqrt": "1 / sqrt_of({0})",
}  # fmt: skip
_CALLS |= {f"math.{name}": f"{name}_of({{0}})" for name in
           ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "tanh", "erf", "floor", "ceil")}  # fmt: skip
_CALLS |= {f"math.{name}": f"{name}({{0}})" for name in ("log1p", "expm1", "tan", "trunc", "roundeven")}
# Functions of CUDA's device library that have a name of their own here; the others are refused.
_LIBRARY = {
    name: f"{name}_of" for name in ("exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "tanh", "erf", "floor",
                                    "ceil")
} | {
    name: name for name in ("pow", "log1p", "expm1", "tan", "atan", "atan2", "asin", "acos", "sinh", "cosh", "fmod",
                            "log10", "cbrt", "hypot", "erfc", "trunc", "rint", "round", "nearbyint", "tgamma",
                            "lgamma", "asinh", "acosh", "atanh")
} | {"fabs": "abs_of", "rsqrt": "1 / sqrt_of", "isnan": "isnan", "isinf": "isinf"}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_EXPENSIVE = re.compile(r"math\.(?!abs|fma)|div|rem|extern|precise|fp_to_fp|mulhi|clampf")

ELEMENTWISE = {
    *_BINARY,
    *_CALLS,
    "arith.cmpi",
    "arith.cmpf",
    "tt.bitcast",
    "arith.bitcast",
    "tt.extern_elementwise",
}


def cost(op: TtirOperation) -> int:
    """About how many instructions a lane of this takes."""
    if op.name not in ELEMENTWISE:
        return 0
    return 10 if _EXPENSIVE.search(op.name) else 1


def expression(op: TtirOperation, given: list[str]) -> str:
    result, first = op.results[0].type, op.operands[0].type
    lane = lane_type(result)
    if op.name in _BINARY:
        symbol = _BINARY[op.name]
        if result.element == "i1":
            symbol = {"+": "^", "-": "^", "*": "&"}.get(symbol, symbol)
        return f"({lane})({rounded(f'{given[0]} {symbol} {given[1]}', result.element)})"
    if op.name == "arith.cmpi":
        predicate = op.text.split(",")[0].split()[-1]
        sign = f"(unsigned_of<{lane_type(first)}>)" if predicate[0] == "u" else ""
        if first.element == "i1" and predicate[0] == "s":
            sign = "-(int)"  # true is -1
        return f"{sign}{given[0]} {_COMPARE[predicate[-2:]]} {sign}{given[1]}"
    if op.name == "arith.cmpf":
        return _compare_floats(op.text.split(",")[0].split()[-1], *given)
    if op.name.endswith("bitcast"):
        return _same_bits(given[0], first, result)
    if op.name == "tt.extern_elementwise":
        found = re.search(r'symbol = "__nv_(\w+?)"', op.text)
        symbol = found[1] if found else ""
        name = _LIBRARY.get(symbol) or _LIBRARY.get(symbol.removesuffix("f"))
        if name is None:
            raise op.refused(f"the library function {symbol or op.text} has no counterpart here")
        return f"({lane})({name}({', '.join(given)}))"
    text = _CALLS[op.name].format(*given, T=lane, U=f"unsigned_of<{lane}>", A=lane_type(first))
    if op.name in ("arith.divsi", "arith.remsi") and re.fullmatch(r"(?:INT64_C)?\([1-9]\d*\)", given[1]):
        # By a constant there is no test for zero, and the loop over lanes stays vectors.
        text = f"({lane})({given[0]} {'/' if 'div' in op.name else '%'} {given[1]})"
    if op.name == "arith.extsi" and first.element == "i1":
        text = f"({lane})-(int){given[0]}"
    if op.name == "arith.select" or not result.is_float or op.name == "arith.extf":
        return text
    return rounded(text, result.element)


def _compare_floats(predicate: str, a: str, b: str) -> str:
    if predicate in ("true", "false"):
        return predicate
    unordered = f"({a} != {a} || {b} != {b})"
    if predicate in ("ord", "uno"):
        return unordered if predicate == "uno" else f"!{unordered}"
    if predicate == "one":
        return f"({a} < {b} || {a} > {b})"
    if predicate == "ueq":
        return f"!({a} < {b} || {a} > {b})"
    if predicate[0] == "o" or predicate == "une":
        return f"{a} {_COMPARE[predicate[1:]]} {b}"
    opposite = {"lt": ">=", "le": ">", "gt": "<=", "ge": "<"}[predicate[1:]]
    return f"!({a} {opposite} {b})"


def _same_bits(text: str, source: Type, result: Type) -> str:
    if result.is_pointer:
        return f"({lane_type(result)}){text}"
    narrow = source.is_float and source.element not in ("f32", "f64")
    bits = f"stored<{memory_type(source.element)}>({text})" if narrow else text
    if source.element == "i1" or result.element == "i1":
        return f"({lane_type(result)}){text}"
    if result.is_float and result.element not in ("f32", "f64"):
        return f"get(same_bits<{memory_type(result.element)}>({bits}))"
    return f"same_bits<{lane_type(result)}>({bits})"
