"""What is wrong with the section `kubernetes:` of a job file, setting by setting. Asked before anything is written
or submitted; `job_check` has the other sections.
"""

import re
from collections.abc import Iterator

from cumulo.cluster.kubernetes_settings import KubernetesSettings

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
