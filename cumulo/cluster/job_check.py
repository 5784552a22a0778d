"""What is wrong with a job file: each problem with the setting it is about, so that the file's line can be named.
`JobFile` asks for `problems`; `read_job` and `launch` also for `launch_problems`, which a stored job may keep.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import yaml

from cumulo.base.nearest import did_you_mean, nearest
from cumulo.cluster.job_settings import (
    DeviceGroup,
    JobSettings,
    KubernetesSettings,
    ServeWork,
    memory_mib,
    seconds,
)
from cumulo.errors import ConfigError
from cumulo.spec.catalog import shipped

_LABEL_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.A)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.A)
_RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.A)
_IMAGE = re.compile(r"[a-z0-9][\w./:@-]*", re.A | re.I)
_MEMORY = re.compile(r"[1-9]\d{0,6}(Mi|Gi|Ti|M|G|T)")
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.A)
_URL = re.compile(r"https?://[^\s/:]+(:\d{1,5})?(/\S*)?")
_PICKER = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(:\d{1,5})?")
_NAMES = "lower-case letters, digits and hyphens"
# Of a setting: its form, and how to say it.
_FORMS = {
    "namespace": (_LABEL_NAME, f"{_NAMES}, at most 63"),
    "queue": (_OBJECT_NAME, _NAMES),
    "claim": (_OBJECT_NAME, f"the name of a PersistentVolumeClaim: {_NAMES}"),
    "secret": (_OBJECT_NAME, f"the name of a Secret: {_NAMES}"),
    "image": (_IMAGE, "an image, such as registry.example/cumulo:0.1"),
    "gpu_resource": (_RESOURCE, "a resource, such as nvidia.com/gpu"),
    "rdma": (_RESOURCE, "a resource, such as rdma/hca"),
    "leaf_label": (_LABEL_KEY, "the key of a label, such as cumulo.dev/leaf"),
    "memory_per_gpu": (_MEMORY, "an amount such as 64Gi"),
    "gateway": (_URL, "an address such as http://gateway:8000"),
    "prometheus": (_URL, "an address such as http://prometheus:9090"),
    "endpoint_picker": (_PICKER, "a Service, as NAME or NAME:PORT"),
}
_BOUNDS = {"quota": 1_000_000, "node_gpus": 1024, "waiting_per_replica": 1_000_000, "cpus_per_gpu": 1024}


def kubernetes_problems(settings: KubernetesSettings) -> Iterator[tuple[str, str]]:
    for name, (form, words) in _FORMS.items():
        value = getattr(settings, name)
        if value is not None and not form.fullmatch(value):
            yield f"kubernetes.{name}", f"kubernetes.{name} must be {words}; got {value!r}"
    for name, most in _BOUNDS.items():
        value = getattr(settings, name)
        if value is not None and not 1 <= value <= most:
            yield f"kubernetes.{name}", f"kubernetes.{name} must be 1 to {most:,}, got {value}"
    for number, leaf in enumerate(settings.leafs):
        if not _LABEL_NAME.fullmatch(leaf):
            where = f"kubernetes.leafs[{number}]"
            yield where, f"{where} must be {_NAMES}, at most 63; got {leaf!r}"
        elif leaf in settings.leafs[:number]:
            yield f"kubernetes.leafs[{number}]", f"kubernetes.leafs has {leaf} twice"
    for key, value in settings.node_labels.items():
        if not _LABEL_KEY.fullmatch(str(key)) or not _LABEL_VALUE.fullmatch(value):
            text = "must be labels of nodes, such as nvidia.com/gpu.product: NVIDIA-H200"
            yield "kubernetes.node_labels", f"kubernetes.node_labels {text}; got {key}: {value!r}"
    for key, value in settings.nccl.items():
        if not _VARIABLE.fullmatch(str(key)) or not value.isprintable():
            text = f"kubernetes.nccl must be variables such as NCCL_IB_GID_INDEX, got {key}: {value!r}"
            yield "kubernetes.nccl", text


_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")  # a name that Slurm, Ray and Kubernetes all take
_TENANT = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")  # as the value of a label
_SLURM_WORD = re.compile(r"[A-Za-z0-9_.,+-]+")
_RAY_ADDRESS = re.compile(r"(ray://)?([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\]):(\d{1,5})")
_PART = re.compile(r"\.(\w+)|\[(\d+)\]")
# GPUs that clusters have and our catalogue does not price.
_MORE_GPUS = (
    "p100", "v100", "t4", "l4", "l40", "a2", "a10", "a10g", "a16", "a30", "a40", "a6000", "rtx-6000", "rtx-3090",
    "h20", "gh200", "mi210", "mi250", "mi250x", "mi300a", "mi325x", "mi350x", "mi355x",
)  # fmt: skip
# Of `cumulo train`: whether the option takes a value.
TRAIN_OPTIONS: Mapping[str, bool] = {
    "--set": True, "--folder": True, "--steps": True, "--collective": True, "--collective-profile": True,
    "--json": True, "--resume": False, "--show-config": False, "--explain-layout": False, "--verify-layout": False,
    "--help": False,
}  # fmt: skip

_MOST_WAIT_S = 30 * 86_400
_MOST_COUNT, _MOST_PRIORITY = 1_000_000, 1_000_000_000
Problem = tuple[str, str]  # the setting, such as devices[0].kind, and what is wrong with it


class JobFileError(ConfigError):
    """What is wrong with a job, setting by setting."""

    def __init__(self, found: Sequence[Problem]) -> None:
        super().__init__("; ".join(text for _, text in found))
        self.problems = found


def in_file(error: ConfigError, path: str, text: str, root: str) -> ConfigError:
    """The same error with the file's line before each problem. `root` is what the error calls the whole file."""
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


def problems(job: JobSettings) -> Iterator[Problem]:
    if not _NAME.fullmatch(job.name):
        text = "must be lower-case letters, digits and hyphens, at most 42, such as tiny-lm"
        yield "name", f"name {text}; got {job.name!r}"
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
    if job.restart.most < 0:
        yield "restart.most", f"restart.most must be 0 or more, got {job.restart.most}"
    yield from _time_problems(job)
    if not _TENANT.fullmatch(job.tenant):
        text = f"tenant must be letters, digits, '-', '_' and '.', at most 63, got {job.tenant!r}"
        yield "tenant", text
    yield from _target_problems(job)


def _time_problems(job: JobSettings) -> Iterator[Problem]:
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


def _target_problems(job: JobSettings) -> Iterator[Problem]:
    for name in ("partition", "account", "qos"):
        word = getattr(job.slurm, name)
        if word is not None and not _SLURM_WORD.fullmatch(word):
            text = f"must be letters, digits, '-', '_', '.', '+' and ',', got {word!r}"
            yield f"slurm.{name}", f"slurm.{name} {text}"
    address = job.ray.address
    if address not in (None, "auto", "local") and not _RAY_ADDRESS.fullmatch(str(address)):
        yield "ray.address", f"ray.address must be HOST:PORT, such as 10.0.0.7:6379, got {address!r}"
    for name, work in (("train", job.train), ("serve", job.serve)):
        for number, option in enumerate(work.options if work is not None else ()):
            if option.startswith("--") and " " in option and "=" not in option:
                first, _, rest = option.partition(" ")
                text = f"options is a list of words: write [{first}, {rest!r}] instead of {option!r}"
                yield f"{name}.options[{number}]", text


def _serve_problems(serve: ServeWork) -> Iterator[Problem]:
    low = serve.replicas if serve.min_replicas is None else serve.min_replicas
    high = serve.replicas if serve.max_replicas is None else serve.max_replicas
    if not 0 <= low <= serve.replicas <= high or high < 1:
        between = f"between min_replicas {low} and max_replicas {high}"
        yield "serve.replicas", f"serve.replicas {serve.replicas} must be {between}"
    if not 0 <= serve.port < 65536:
        yield "serve.port", f"serve.port must be 0 to 65535, got {serve.port}"
    if serve.model is not None and serve.plan is not None:
        yield "serve.plan", "serve needs `model:` or `plan:`, not both"


def _device_problems(group: DeviceGroup, where: str) -> Iterator[Problem]:
    if group.count < 1:
        yield f"{where}.count", f"devices.count must be 1 or more, got {group.count}"
    if group.per_node is not None and (group.per_node < 1 or group.count % group.per_node):
        multiple = f"is not a multiple of per_node {group.per_node}"
        yield f"{where}.per_node", f"devices.count {group.count} {multiple}"
    if group.memory is not None:
        try:
            memory_mib(group.memory)
        except ConfigError as error:
            yield f"{where}.memory", str(error)


def launch_problems(job: JobSettings) -> Iterator[Problem]:
    """Names that no target and no command knows, and amounts that cannot be meant."""
    for number, group in enumerate(job.devices):
        yield from _unknown_kind(group.kind, f"devices[{number}].kind")
    if job.serve is not None and job.serve.plan is None and len(job.devices) == 1:
        yield from _uneven_replicas(job.serve.replicas, job.devices[0])
    if job.train is not None:
        yield from _unknown_options(job.train.options)
        if job.train.folder is not None and (not job.train.folder or not job.train.folder.isprintable()):
            yield "train.folder", f"train.folder must be a folder's name, got {job.train.folder!r}"
    yield from _useless(job)
    yield from _huge(job)
    yield from kubernetes_problems(job.kubernetes)


def _huge(job: JobSettings) -> Iterator[Problem]:
    """Numbers that no target takes: most are slips."""
    counts = {f"devices[{number}].count": group.count for number, group in enumerate(job.devices)}
    if job.elastic is not None:
        counts["elastic.max"] = job.elastic.max
    if job.serve is not None and job.serve.max_replicas is not None:
        counts["serve.max_replicas"] = job.serve.max_replicas
    counts["restart.most"] = job.restart.most
    for name, count in counts.items():
        if count > _MOST_COUNT:
            yield name, f"{name} must be {_MOST_COUNT:,} or less, got {count}"
    if abs(job.priority) > _MOST_PRIORITY:
        yield "priority", f"priority must be -{_MOST_PRIORITY:,} to {_MOST_PRIORITY:,}, got {job.priority}"


def _useless(job: JobSettings) -> Iterator[Problem]:
    """Amounts and words with which a job would be refused or would never do what they say."""
    for number, group in enumerate(job.devices):
        if group.memory is not None and group.memory_mib < 1:
            yield f"devices[{number}].memory", f"devices.memory must be at least 1MiB, got {group.memory!r}"
    if job.deadline is not None and seconds(job.deadline, "deadline") <= 0:
        yield "deadline", f"deadline must be more than 0, such as 2h, got {job.deadline!r}"
    each = job.devices[0].per_node
    for name in ("min", "max") if job.elastic is not None and each is not None else ():
        count = getattr(job.elastic, name)
        if count % each:
            near = {count // each * each, -(-count // each) * each} - {0}
            use = " or ".join(map(str, sorted(near)))
            text = f"elastic.{name} {count} is not a multiple of per_node {each}: use {use}"
            yield f"elastic.{name}", text
    if job.restart.most and not job.restart.ways:
        text = "restart.ways names no way to restart: use spare, shrink or wait, or restart.most: 0"
        yield "restart.ways", text
    for number, option in enumerate(job.slurm.options):
        if not option.startswith("-") or not option.isprintable():
            text = f"slurm.options are options of sbatch, such as --constraint=ib, got {option!r}"
            yield f"slurm.options[{number}]", text
    port = _RAY_ADDRESS.fullmatch(job.ray.address or "")
    if port is not None and not 0 < int(port[3]) < 65536:
        yield "ray.address", f"the port of ray.address must be 1 to 65535, got {port[3]}"
    if job.serve is not None:
        yield from _useless_service(job.serve)


def _useless_service(serve: ServeWork) -> Iterator[Problem]:
    if serve.model == "":
        yield "serve.model", "serve.model is empty: leave it out for the built-in model"
    elif serve.model is not None and not serve.model.isprintable():
        text = f"serve.model must be a folder, a file or a Hugging Face name, got {serve.model!r}"
        yield "serve.model", text
    if (scaling := serve.autoscale) is None:
        return
    if (serve.min_replicas, serve.max_replicas) == (None, None):
        yield "serve.autoscale", "serve.autoscale needs min_replicas and max_replicas to choose between"
    for name in ("prompt_tok_s", "output_tok_s", "interval_s", "ttft_s", "itl_s"):
        value = getattr(scaling, name)
        if value is not None and not 0 < value < math.inf:
            text = f"serve.autoscale.{name} must be more than 0, got {value:g}"
            yield f"serve.autoscale.{name}", text
    for name in ("start_up_s", "cooldown_s", "idle_s"):
        value = getattr(scaling, name)
        if value is not None and not 0 <= value <= _MOST_WAIT_S:
            text = f"serve.autoscale.{name} must be 0 to {_MOST_WAIT_S:,} seconds, got {value:g}"
            yield f"serve.autoscale.{name}", text


def _unknown_kind(kind: str, where: str) -> Iterator[Problem]:
    if kind in ("cpu", "gpu"):
        return
    priced = [name for name in shipped().tables["devices"] if name != "cpu"]
    known = dict.fromkeys(["cpu", "gpu", *priced, *(name.split("-")[0] for name in priced), *_MORE_GPUS])
    if kind in known:
        return
    close = nearest(kind.lower().replace("_", "-"), known)
    meant = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
    own = "kind: gpu asks for any GPU; slurm.options or kubernetes.node_labels can name a type of your own"
    yield where, f"devices.kind {kind!r} is no known device; {meant} {own}"


def _uneven_replicas(replicas: int, group: DeviceGroup) -> Iterator[Problem]:
    """A gang of one task is what each replica gets (Ray); larger ones are divided between the replicas."""
    tasks = group.tasks
    if replicas <= 1 or tasks <= 1 or tasks % replicas == 0:
        return
    able = [number for number in range(1, tasks + 1) if tasks % number == 0]
    below = max(number for number in able if number < replicas)
    above = min((number for number in able if number > replicas), default=None)
    better = f"{below} or {above} replicas" if above else f"{below} replica{'s' if below > 1 else ''}"
    counts = [
        number * group.each for number in {tasks // replicas * replicas, -(-tasks // replicas) * replicas}
    ]
    devices = " or ".join(str(count) for count in sorted(counts) if count)
    text = f"serve.replicas {replicas} cannot share devices.count {group.count} equally"
    yield "serve.replicas", f"{text}: use {better}, or {devices} devices"


def _unknown_options(options: Sequence[str]) -> Iterator[Problem]:
    value_of = ""  # the option whose value is the next word
    unknown = False  # whether the last option was: its value is not named as well
    for number, word in enumerate(options):
        where = f"train.options[{number}]"
        if value_of:
            if value_of == "--set" and "=" not in word:
                yield where, f"train.options: --set needs NAME=VALUE, such as steps=40, got {word!r}"
            value_of = ""
            continue
        name, gives, _ = word.partition("=")
        if not word.startswith("-"):
            if not unknown:
                yield where, f"train.options: {word!r} belongs to no option of `cumulo train`"
        elif unknown := name not in TRAIN_OPTIONS:
            near = did_you_mean(name, TRAIN_OPTIONS)
            yield where, f"train.options: `cumulo train` has no option {name}{near}"
        elif name == "--folder":
            yield where, "train.options: the folder of the run is `train: {folder: ...}`, not an option"
            value_of = "" if gives else name
        elif TRAIN_OPTIONS[name] and not gives:
            value_of = name
    if value_of:
        last = f"train.options[{len(options) - 1}]"
        yield last, f"train.options: {value_of} needs a value after it"
