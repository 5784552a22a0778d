"""KernelLaunch: one way in which a Triton kernel is started, as data: types of its arguments, constants, options.
`find_launch` makes it from what a user names, one of our kernels or `file.py:function`, for `cumulo compile`.

Our kernels' launches were recorded while their tests ran on a GPU (`recording`); launches.json keeps one of each.
A user's kernel says most itself: arguments that are loaded from or stored to are pointers, others are numbers.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.errors import ConfigError

RECORDED = Path(__file__).with_name("launches.json")
_TYPES = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64", "int32": "i32", "int64": "i64",
}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "launch_pdl")


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """What a compiler must know of a launch. `kernel` is module:function; `file` where a user's kernel is."""

    kernel: str
    signature: dict[str, str]  # argument -> "*fp32", "i32", "constexpr"
    constants: dict[str, Any]  # argument -> value, or index path within a tuple -> value
    attributes: dict[str, list[list[Any]]] = field(
        default_factory=dict
    )  # index path -> [["tt.divisibility", 16]]
    options: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    numbers: dict[str, int] = field(
        default_factory=dict
    )  # what a number is taken to be where addresses are read
    guessed: tuple[str, ...] = ()  # arguments whose type nobody said

    @property
    def name(self) -> str:
        return self.kernel.rpartition(":")[2]

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}


def launch_of_json(raw: Mapping[str, Any]) -> KernelLaunch:
    return KernelLaunch(**{"constants": {}, **raw, "guessed": tuple(raw.get("guessed", ()))})


# -- ours, recorded -----------------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def recorded() -> dict[str, KernelLaunch]:
    """Our kernels by name: the file's, and the function's where a file has several."""
    launches = [launch_of_json(raw) for raw in json.loads(RECORDED.read_text("utf-8"))]
    files = [one.kernel.partition(":")[0].rpartition(".")[2] for one in launches]
    return {
        file if files.count(file) == 1 else f"{file}.{one.name.lstrip('_')}": one
        for file, one in zip(files, launches, strict=True)
    }


@contextmanager
def recording(found: dict[str, KernelLaunch], modules: str = "cumulo.") -> Iterator[None]:
    """While this runs, every kernel that Triton compiles for the first time is noted in `found`."""
    from triton import knobs

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        if fn.module.startswith(modules):
            launch = _noted(fn, compile)
            if launch is not None:
                found.setdefault(json.dumps(launch.as_json(), sort_keys=True), launch)
        return False

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _noted(fn: Any, compiled: Mapping[str, Any]) -> KernelLaunch | None:
    try:
        constants = {_path(key): _plain(value) for key, value in compiled["constants"].items()}
        attributes = {_path(key): value for key, value in compiled["configs"][0].items()}
    except TypeError:
        return None  # a constant that cannot be written down
    options = {name: compiled[name] for name in _OPTIONS if name in compiled}
    signature = json.loads(json.dumps(compiled["signature"]))
    return KernelLaunch(f"{fn.module}:{fn.name}", signature, constants, attributes, options)


def _path(key: Any) -> str:
    return key if isinstance(key, str) else ".".join(map(str, key))


def _plain(value: Any) -> Any:
    """A constant as JSON holds it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    if kind == "constexpr":
        return _plain(value.value)
    if kind == "dtype":
        return {"dtype": value.name}
    if kind in ("JITFunction", "GluonJITFunction"):
        return {"function": f"{value.fn.__module__}:{value.fn.__qualname__}"}
    raise TypeError(kind)


def unplain(value: Any) -> Any:
    """A constant as Triton takes it."""
    if isinstance(value, dict) and "dtype" in value:
        import triton.language as tl

        return tl.dtype(value["dtype"])
    if isinstance(value, dict) and "function" in value:
        module, _, name = value["function"].partition(":")
        return getattr(importlib.import_module(module), name)
    return value


# -- what a user names --------------------------------------------------------------------------------------------
def find_launch(
    named: str,
    types: Mapping[str, str],
    numbers: Mapping[str, str],
    options: Mapping[str, int],
    if_there: bool = False,
) -> KernelLaunch:
    """`named`: one of ours, or FILE.py:FUNCTION. `types` and `numbers`: what `--arg` and `--set` said;
    with `if_there`, of the arguments that this kernel has."""
    if ".py" in named or "/" in named:
        launch = _of_file(named, types, numbers, if_there)
    else:
        ours = recorded()
        if named not in ours:
            inside = [one for one in ours if one.startswith(f"{named}.")]
            if inside:
                raise ConfigError(f"{named} has {len(inside)} kernels; name one: {', '.join(inside)}")
            hint = did_you_mean(named, ours, otherwise="; `cumulo compile kernels` lists them")
            raise ConfigError(f"there is no kernel {named}{hint} A kernel of yours is FILE.py:FUNCTION.")
        launch = _changed(ours[named], types, numbers, if_there)
    return replace(launch, options={**launch.options, **options})


def _changed(
    launch: KernelLaunch, types: Mapping[str, str], numbers: Mapping[str, str], if_there: bool
) -> KernelLaunch:
    """With other types and constants."""
    if if_there:
        types = {name: told for name, told in types.items() if name in launch.signature}
        numbers = {name: told for name, told in numbers.items() if name in launch.signature}
    for name in (*types, *numbers):
        if name not in launch.signature:
            raise ConfigError(f"{launch.name} has no argument {name}{did_you_mean(name, launch.signature)}")
    signature = {**launch.signature, **{name: _type(name, told) for name, told in types.items()}}
    names = list(signature)
    constants, values = dict(launch.constants), dict(launch.numbers)
    for name, told in numbers.items():
        if signature[name] == "constexpr":
            constants.pop(str(names.index(name)), None)
            constants[name] = constant(told)
        else:
            values[name] = _number(name, told)
    return replace(launch, signature=signature, constants=constants, numbers=values)


def _type(name: str, told: str) -> str:
    star, plain = ("*" if told.startswith("*") else ""), told.lstrip("*")
    plain = _TYPES.get(plain, plain)
    known = {*_TYPES.values(), "i1", "i8", "i16", "u8", "u16", "u32", "u64", "fp8e4nv", "fp8e5"}
    if plain not in known:
        raise ConfigError(
            f"--arg {name}={told}: types are {', '.join(sorted(known))}, a pointer's begins with *"
        )
    return star + plain


def _number(name: str, told: str) -> int:
    try:
        return int(told)
    except ValueError:
        raise ConfigError(f"--set {name}={told}: this argument is a whole number") from None


def constant(told: str) -> Any:
    """True, 16, 0.5, float32 (a type of Triton's) or a text."""
    if told in _TYPES or told in _TYPES.values():
        return {"dtype": _TYPES.get(told, told)}
    try:
        return ast.literal_eval(told)
    except (ValueError, SyntaxError):
        return told


def load_function(file: str, name: str) -> Any:
    """A kernel of a user's file; the file's own errors name its line."""
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"there is no file {file}")
    module_name = f"cumulo_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file} cannot be imported: {_where(error, file)}") from error
    finally:
        sys.path.remove(str(path.parent))
    kernels = {key: value for key, value in vars(module).items() if hasattr(value, "arg_names")}
    if name not in kernels:
        raise ConfigError(f"{file} has no Triton kernel {name}{did_you_mean(name, kernels)}")
    return kernels[name]


def _where(error: Exception, file: str) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    trace, line = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(Path(file)):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"line {line}: {type(error).__name__}: {error}"


def _of_file(
    named: str, types: Mapping[str, str], numbers: Mapping[str, str], if_there: bool
) -> KernelLaunch:
    file, _, name = named.rpartition(":")
    if not file:
        raise ConfigError(f"{named}: name a kernel of the file, as in {named}:FUNCTION")
    kernel = load_function(file, name)
    source = inspect.getsource(kernel.fn)
    reached = _reached(source)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    guessed = []
    for parameter in inspect.signature(kernel.fn).parameters.values():
        if "constexpr" in str(parameter.annotation):
            signature[parameter.name] = "constexpr"
            if parameter.name not in numbers:
                if parameter.default is inspect.Parameter.empty:
                    told = f"--set {parameter.name}=VALUE"
                    raise ConfigError(f"{name}: the constant {parameter.name} needs a value: {told}")
                constants[parameter.name] = _plain(parameter.default)
        else:
            signature[parameter.name] = "*fp32" if parameter.name in reached else "i32"
            if parameter.name not in types:
                guessed.append(parameter.name)
    launch = KernelLaunch(
        f"{Path(file).stem}:{name}", signature, constants, file=file, guessed=tuple(guessed)
    )
    launch = _changed(launch, types, numbers, if_there)
    pointers = [index for index, kind in enumerate(launch.signature.values()) if kind.startswith("*")]
    aligned = {str(index): [["tt.divisibility", 16]] for index in pointers}
    return replace(launch, attributes=aligned)


def _reached(source: str) -> set[str]:
    """Names in the address of a load, a store or an atomic: through assignments, back to where they come from."""
    tree = ast.parse(textwrap.dedent(source))
    parts: dict[str, set[str]] = {}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets: Sequence[ast.AST] = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    parts.setdefault(target.id, set()).update(_first_terms(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            called = node.func.attr
            if called in ("load", "store", "make_block_ptr") or called.startswith("atomic_"):
                found |= _first_terms(node.args[0])
    ahead = list(found)
    while ahead:
        for name in parts.get(ahead.pop(), set()) - found:
            found.add(name)
            ahead.append(name)
    return found


def _first_terms(node: ast.AST) -> set[str]:
    """Of a sum, its first term's name: a pointer stands before what is added to it."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return {node.id} if isinstance(node, ast.Name) else set()


def kernel_of(launch: KernelLaunch) -> Any:
    """The function itself."""
    module, _, name = launch.kernel.partition(":")
    if launch.file:
        return load_function(launch.file, name)
    return getattr(importlib.import_module(module), name)
