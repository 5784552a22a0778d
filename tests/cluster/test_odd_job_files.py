"""Job files with odd content: each is refused in words with the file, the line and the setting, on every target."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cli.launch import launch
from cumulo.cluster import launching
from cumulo.cluster.job_file import job_from, read_job
from cumulo.cluster.job_store import TARGETS, JobStore
from cumulo.errors import ConfigError, CumuloError
from tests.cli.conftest import ROOT

TRAIN: dict[str, Any] = {
    "name": "tiny",
    "train": {"config": str(ROOT / "examples" / "train-tiny.yaml"), "folder": "run", "options": ["--steps", "30"]},
    "devices": {"count": 2, "kind": "cpu", "per_node": 1, "memory": "1GiB"},
    "deadline": "2h", "time_limit": "1h", "elastic": {"min": 1, "max": 4}, "restart": {"most": 3, "ways": ["wait"]},
    "slurm": {"partition": "main", "options": ["--constraint=ib"]}, "ray": {"address": "127.0.0.1:6379"},
    "kubernetes": {
        "namespace": "n", "scheduler": "kueue", "quota": 8, "leafs": ["a"], "claim": "c", "node_labels": {"a": "b"},
        "memory_per_gpu": "64Gi", "rdma": "rdma/hca", "nccl": {"A": "b"},
    },
}  # fmt: skip
SERVE: dict[str, Any] = {
    "name": "web",
    "serve": {
        "model": "org/model", "replicas": 2, "min_replicas": 1, "max_replicas": 4, "port": 8000,
        "options": ["--tp", "1"], "autoscale": {"prompt_tok_s": 400, "output_tok_s": 60, "start_up_s": 20},
    },
    "devices": {"count": 2, "kind": "gpu"},
    "kubernetes": {"autoscaler": "cumulo", "quota": 8, "gateway": "http://g:1", "inference_pool": True},
}  # fmt: skip
ALL_OPTIONS: dict[str, Any] = {
    "on": "local", "dry_run": False, "key": None, "slots": None, "policy": None, "wait": False, "out_folder": None,
    "form": "yaml", "store": None,
}  # fmt: skip
ODD = [
    "x",
    "",
    -1,
    10**30,
    1.5,
    True,
    None,
    [],
    {},
    "ü",
    "a b",
    float("nan"),
    [1],
    {"a": 1},
    "x" * 300,
    "a\nb",
]
EVERY = 7


def fields_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*path, key)
        yield from fields_of(one, (*path, key))


def changed(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(content)
    place: Any = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return made


@pytest.mark.long
@pytest.mark.parametrize("content", [TRAIN, SERVE], ids=["train", "serve"])
def test_odd_values_are_taken_or_refused_in_words(
    tmp_path: Path, content: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    file, store = tmp_path / "job.yaml", JobStore(tmp_path / "store")
    cases = [(path, value) for path in fields_of(content) for value in ODD]
    for path, value in cases[:: 1 if request.config.getoption("--thorough") else EVERY]:
        file.write_text(yaml.safe_dump(changed(content, path, value), allow_unicode=True), "utf-8")
        try:
            job = read_job(file)
        except ConfigError as error:
            assert str(error).startswith(f"{file}:"), (path, value, str(error))
            continue
        for target in TARGETS:
            try:
                launching.explain(job, target, store)
            except CumuloError as error:
                assert str(error)
    assert store.jobs() == {}


@pytest.mark.parametrize(
    ("base", "setting", "value", "said"),
    [
        (TRAIN, ("train", "config"), "x" * 300, "train.config cannot be 'xxx"),
        (TRAIN, ("train", "folder"), "", "train.folder must be a folder's name"),
        (TRAIN, ("elastic", "max"), 10**30, "elastic.max must be 1 to 1,000,000"),
        (TRAIN, ("restart", "most"), 10**30, "restart.most must be 0 to 1,000,000"),
        (TRAIN, ("priority",), 10**30, "priority must be -1,000,000,000 to"),
        (TRAIN, ("kubernetes", "namespace"), "my team", "kubernetes.namespace must be lower-case"),
        (TRAIN, ("kubernetes", "memory_per_gpu"), "64 GB", "kubernetes.memory_per_gpu must be an amount"),
        (TRAIN, ("kubernetes", "node_gpus"), 0, "kubernetes.node_gpus must be 1 to 1,024"),
        (TRAIN, ("kubernetes", "leafs"), ["a", "a"], "kubernetes.leafs has a name twice"),
        (TRAIN, ("kubernetes", "leafs"), ["a", "ü"], r"kubernetes.leafs\[1\] must be lower-case"),
        (TRAIN, ("kubernetes", "node_labels", "a"), "ü", "kubernetes.node_labels must be labels of nodes"),
        (TRAIN, ("kubernetes", "rdma"), "hca", "kubernetes.rdma must be a resource, such as rdma/hca"),
        (TRAIN, ("kubernetes", "claim"), "My_Claim", "kubernetes.claim must be the name of a P"),
        (SERVE, ("kubernetes", "gateway"), "gateway:8000", "kubernetes.gateway must be an address such as http://"),
        (SERVE, ("kubernetes", "endpoint_picker"), "epp:http", "kubernetes.endpoint_picker must be a Service"),
        (SERVE, ("serve", "max_replicas"), 10**9, "serve.max_replicas must be 1 to 1,000,000"),
        (SERVE, ("serve", "autoscale", "start_up_s"), -5, "serve.autoscale.start_up_s must be 0 to"),
        (SERVE, ("serve", "autoscale", "ttft_s"), 0, "serve.autoscale.ttft_s must be more than 0"),
        (SERVE, ("serve", "model"), "a\nb", "serve.model must be a folder, a file or a Hugging Face name"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_named_with_its_line(
    tmp_path: Path, base: dict[str, Any], setting: tuple[str, ...], value: Any, said: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(changed(base, setting, value), allow_unicode=True), "utf-8")
    with pytest.raises(ConfigError, match=rf"job\.yaml:\d+: {said}"):
        read_job(file)


def test_amounts_of_memory_have_other_units_than_gi_too() -> None:
    """Quotas and pods are multiples of what a GPU has."""
    settings = {"scheduler": "kueue", "quota": 8, "memory_per_gpu": "1Ti"}
    job = job_from({**SERVE, "kubernetes": settings})
    text = launching.explain(job, "kubernetes")
    assert "memory: 1Ti" in text and "nominalQuota: 8Ti" in text


def test_manifests_are_written_only_for_a_layout_that_fits_the_devices(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({**TRAIN, "devices": {"count": 4, "per_node": 1}}), "utf-8")
    with pytest.raises(ConfigError, match="has 2 ranks, and the job asks for 4 devices"):
        launch(file, **ALL_OPTIONS | {"on": "kubernetes", "out_folder": tmp_path / "out"})
    assert not (tmp_path / "out").exists()


def test_a_word_that_belongs_to_no_option_of_the_server_is_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(changed(SERVE, ("serve", "options"), ["tp=4"])), "utf-8")
    with pytest.raises(ConfigError, match=r"job\.yaml:\d+: serve.options: .*unexpected extra argument.*tp=4"):
        launch(file, **ALL_OPTIONS | {"on": "slurm", "dry_run": True, "store": tmp_path})
