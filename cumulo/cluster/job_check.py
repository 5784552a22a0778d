"""What is wrong with a job file: each problem with the setting it is about, so that the file's line can be named.
`read_job` and `launch` call `check_job`.

Most rules are lines of a table, data/job_rules.yaml: the form of a text, or the range of a number.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from cumulo.base.nearest import nearest
from cumulo.base.strict import package_yaml
from cumulo.cluster.job_settings import DeviceGroup, JobFile, ServeWork, memory_mib, seconds
from cumulo.errors import ConfigError
from cumulo.spec.catalog import shipped

_PART = re.compile(r"\.(\w+)|\[(\d+)\]")
_MOST = 1_000_000_000  # of numbers that have no range of their own
Problem = tuple[str, str]  # the setting, such as devices[0].kind, and what is wrong with it


def _rules() -> Any:
    """The content of data/job_rules.yaml."""
    return package_yaml("cumulo.cluster", "data/job_rules.yaml")


class JobFileError(ConfigError):
    """What is wrong with a job, setting by setting."""

    def __init__(self, found: Sequence[Problem]) -> None:
        super().__init__("; ".join(text for _, text in found))
        self.problems = found


def in_file(error: ConfigError, path: Path, root: str) -> ConfigError:
    """The same error with the file's line before each problem. `root` is what the error calls the whole file."""
    text = path.read_text("utf-8")
    found: Sequence[Problem]
    if isinstance(error, JobFileError):
        found = error.problems
    else:
        said = str(error)
        inside = re.match(rf"{re.escape(root)}((?:{_PART.pattern})*)", said)
        setting = inside[1].removeprefix(".") if inside else ""
        unknown = re.search(r"has no setting '(\w+)'", said)
        words = said.removeprefix(root).removeprefix(".") if setting else said
        found = [(".".join(filter(None, (setting, unknown[1] if unknown else ""))), words)]
    return ConfigError("; ".join(f"{path}:{line_of(text, setting)}: {words}" for setting, words in found))


def line_of(text: str, setting: str) -> int:
    """The line of a setting, or of the nearest one around it."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    line = 0
    for name, index in _PART.findall(f".{setting}"):
        if isinstance(node, yaml.MappingNode) and name:
            found = next(((key, value) for key, value in node.value if key.value == name), None)
            if found is None:
                break
            line, node = found[0].start_mark.line, found[1]
        elif isinstance(node, yaml.SequenceNode) and index and int(index) < len(node.value):
            node = node.value[int(index)]
            line = node.start_mark.line
    return line + 1


# -- the tables ---------------------------------------------------------------------------------------------
def _settings(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All settings with a value, by their path, such as devices[0].count."""
    if dataclasses.is_dataclass(value):
        for one in dataclasses.fields(value):
            yield from _settings(getattr(value, one.name), f"{path}.{one.name}" if path else one.name)
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _settings(item, f"{path}[{number}]")
    elif value is not None:
        yield path, value


def _against_tables(job: JobFile) -> Iterator[Problem]:
    rules = _rules()
    for path, value in _settings(job):
        setting = re.sub(r"\[\d+\]", "", path)
        if form := rules["forms"].get(setting):
            if not re.fullmatch(form[0], value, re.A):
                yield path, f"{path} must be {form[1]}; got {value!r}"
        elif setting in rules["more_than_0"] and not 0 < value <= _MOST:
            yield path, f"{path} must be more than 0 and at most {_MOST:,}, got {value:g}"
        elif limits := rules["ranges"].get(setting):
            low, high = limits
            if not low <= value <= high:
                yield path, f"{path} must be {low:,} to {high:,}, got {value:g}"


# -- rules of several settings ------------------------------------------------------------------------------
def check_job(job: JobFile) -> None:
    """Refuses what contradicts itself; then names that no target knows, and amounts that cannot be meant."""
    for problems in (_against_tables, _contradictions, _unlikely):
        if found := list(problems(job)):
            raise JobFileError(found)


def _contradictions(job: JobFile) -> Iterator[Problem]:
    if (job.train is None) == (job.serve is None):
        given = "both" if job.train is not None else "neither"
        yield "serve", f"a job has either `train:` or `serve:`, and this one has {given}"
    if job.train is not None and (job.train.config is None) == (job.train.plan is None):
        text = "needs `config:`, a training configuration, or `plan:`, what `cumulo plan train --out` wrote"
        yield "train", f"train {text}"
    if job.serve is not None:
        yield from _serve_problems(job.serve)
    if not job.devices:
        yield "devices", "devices must name at least one group, such as {count: 8, kind: h200}"
    for number, group in enumerate(job.devices):
        yield from _device_problems(group, f"devices[{number}]")
    if job.elastic is not None and not 1 <= job.elastic.min <= job.ranks <= job.elastic.max:
        given = f"{job.elastic.min} to {job.elastic.max}"
        yield "elastic", f"elastic must contain devices.count {job.ranks}: got {given}"
    if job.elastic is not None and len(job.devices) > 1:
        yield "elastic", "elastic is for jobs with one kind of devices"
    yield from _time_problems(job)
    for name, work in (("train", job.train), ("serve", job.serve)):
        for number, option in enumerate(work.options if work is not None else ()):
            if option.startswith("--") and " " in option and "=" not in option:
                first, _, rest = option.partition(" ")
                text = f"options is a list of words: write [{first}, {rest!r}] instead of {option!r}"
                yield f"{name}.options[{number}]", text


def _time_problems(job: JobFile) -> Iterator[Problem]:
    for name in ("deadline", "time_limit", "save_before"):
        if (text := getattr(job, name)) is not None:
            try:
                seconds(text, name)
            except ConfigError as error:
                yield name, str(error)
                return
    if job.time_limit is not None:
        limit_s, before_s = seconds(job.time_limit, "time_limit"), seconds(job.save_before, "save_before")
        if limit_s <= before_s:
            longer = f"must be longer than save_before, {job.save_before}"
            yield "time_limit", f"time_limit {job.time_limit} {longer}"


def _serve_problems(serve: ServeWork) -> Iterator[Problem]:
    low, high = serve.fewest, serve.most
    if not 0 <= low <= serve.replicas <= high or high < 1:
        between = f"between min_replicas {low} and max_replicas {high}"
        yield "serve.replicas", f"serve.replicas {serve.replicas} must be {between}"
    if serve.model is not None and serve.plan is not None:
        yield "serve.plan", "serve needs `model:` or `plan:`, not both"


def _device_problems(group: DeviceGroup, where: str) -> Iterator[Problem]:
    if group.per_node is not None and (group.per_node < 1 or group.count % group.per_node):
        multiple = f"is not a multiple of per_node {group.per_node}"
        yield f"{where}.per_node", f"devices.count {group.count} {multiple}"
    if group.memory is not None:
        try:
            memory_mib(group.memory)
        except ConfigError as error:
            yield f"{where}.memory", str(error)


def _unlikely(job: JobFile) -> Iterator[Problem]:
    """Names that no target and no command knows, and amounts and words with which a job would be refused or would
    never do what they say."""
    for number, group in enumerate(job.devices):
        yield from _unknown_kind(group.kind, f"devices[{number}].kind")
        if group.memory is not None and group.memory_mib < 1:
            yield f"devices[{number}].memory", f"devices.memory must be at least 1MiB, got {group.memory!r}"
    if job.serve is not None and job.serve.plan is None and len(job.devices) == 1:
        yield from _uneven_replicas(job.serve.replicas, job.devices[0])
    for number, option in enumerate(job.train.options if job.train is not None else ()):
        if option.partition("=")[0] == "--folder":
            text = "train.options: the folder of the run is `train: {folder: ...}`, not an option"
            yield f"train.options[{number}]", text
    if job.deadline is not None and seconds(job.deadline, "deadline") <= 0:
        yield "deadline", f"deadline must be more than 0, such as 2h, got {job.deadline!r}"
    each = job.devices[0].per_node
    for name in ("min", "max") if job.elastic is not None and each is not None else ():
        count = getattr(job.elastic, name)
        if count % each:
            text = f"elastic.{name} {count} is not a multiple of per_node {each}"
            yield f"elastic.{name}", text
    if job.restart.most and not job.restart.ways:
        text = "restart.ways names no way to restart: use spare, shrink or wait, or restart.most: 0"
        yield "restart.ways", text
    port = re.fullmatch(_rules()["forms"]["ray.address"][0], job.ray.address or "")
    if port is not None and port[3] and not 0 < int(port[3]) < 65536:
        yield "ray.address", f"the port of ray.address must be 1 to 65535, got {port[3]}"
    serve = job.serve
    if serve is not None and serve.autoscale is not None and serve.max_replicas is serve.min_replicas is None:
        yield "serve.autoscale", "serve.autoscale needs min_replicas and max_replicas to choose between"
    if len(set(job.kubernetes.leafs)) < len(job.kubernetes.leafs):
        yield "kubernetes.leafs", "kubernetes.leafs has a name twice"
    for setting, (key_form, value_form, words) in _rules()["keys"].items():
        for key, value in getattr(job.kubernetes, setting.partition(".")[2]).items():
            fits = re.fullmatch(key_form, str(key), re.A) and re.fullmatch(value_form, value, re.A)
            if not fits or not value.isprintable():
                yield setting, f"{setting} must be {words}, got {key}: {value!r}"


def _unknown_kind(kind: str, where: str) -> Iterator[Problem]:
    if kind in ("cpu", "gpu"):
        return
    priced = [name for name in shipped().tables["devices"] if name != "cpu"]
    known = dict.fromkeys(
        ["cpu", "gpu", *priced, *(name.split("-")[0] for name in priced), *_rules()["more_gpus"]]
    )
    if kind in known:
        return
    close = nearest(kind.lower().replace("_", "-"), known)
    meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
    own = "kind: gpu asks for any GPU; slurm.options or kubernetes.node_labels can name a type of your own"
    yield where, f"devices.kind {kind!r} is no known device; {meant} {own}"


def _uneven_replicas(replicas: int, group: DeviceGroup) -> Iterator[Problem]:
    """A gang of one task is what each replica gets (Ray); larger ones are divided between the replicas."""
    if group.tasks > 1 < replicas and group.tasks % replicas and group.count % replicas:
        fewer = group.tasks // replicas * replicas
        devices = " or ".join(str(group.each * tasks) for tasks in (fewer, fewer + replicas) if tasks)
        text = f"serve.replicas {replicas} cannot share devices.count {group.count} equally"
        yield "serve.replicas", f"{text}: use another number of replicas, or {devices} devices"
