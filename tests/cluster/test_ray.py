"""Jobs on a real Ray cluster: gangs and services that outlive a node, replicas that follow the load, a head that is
gone."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from cumulo.cluster import launching
from cumulo.cluster.drivers import ray as ray_driver
from cumulo.cluster.drivers.command import run_folder
from cumulo.cluster.drivers.driver import TargetLost
from cumulo.cluster.job_file import JobFile, job_from, plain_job, resolved
from cumulo.cluster.job_store import JobRecord, JobStore
from cumulo.train.run.log import read_log
from tests.cli.conftest import ROOT
from tests.cluster.ray_cluster import RayCluster, free_port, needs_ray
from tests.models.cut_smollm import cut_smollm
from tests.serve.running_server import needs_built_in_model
from tests.serve.running_server import wait_for as wait_at_most

pytestmark = [needs_ray, pytest.mark.long]
AZURE_CODE = ROOT.parent / "shared" / "data" / "serving" / "azure_llm_2023_code.csv.gz"
PATIENCE_S = 900.0  # a hang guard


def wait_for(condition: Callable[[], object], what: str) -> None:
    wait_at_most(condition, what, patience_s=PATIENCE_S)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobStore:
    monkeypatch.chdir(ROOT)  # the example's sources are relative to it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    return JobStore(tmp_path / "jobs")


@pytest.fixture
def cluster(store: JobStore) -> Iterator[RayCluster]:
    with RayCluster() as found:
        yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_smollm(tmp_path_factory.mktemp("model") / "tiny.gguf")


def gang(name: str, address: str, **more: Any) -> JobFile:
    options = ["--set", "layout.dp=4", "--set", "micro_batch=2"]
    content = {
        "name": name, "train": {"config": "train-tiny.yaml", "options": options},
        "devices": {"count": 4, "kind": "cpu", "per_node": 1}, "ray": {"address": address},
    }  # fmt: skip
    return resolved(job_from(content | more), ROOT / "examples")


def service(model: Path, address: str, **more: Any) -> JobFile:
    content = {
        "name": "service",
        "serve": {
            "model": str(model), "port": free_port(), "options": ["--threads", "1", "--name", "tiny"], **more,
        },
        "devices": {"count": 1, "kind": "cpu", "per_node": 1}, "ray": {"address": address},
    }  # fmt: skip
    return job_from(content)


def look(store: JobStore, record: JobRecord) -> JobRecord:
    launching.refreshed(store)
    return store.jobs()[record.job_id]


def output(record: JobRecord) -> str:
    return (Path(record.folder) / "output.log").read_text()


def test_a_head_that_is_gone_is_named_and_nothing_is_lost(store: JobStore) -> None:
    address = f"127.0.0.1:{free_port()}"
    for _ in range(2):
        with pytest.raises(TargetLost, match=f"the Ray head at {address} does not answer"):
            launching.launch(gang("kept", address), "ray", store)
    assert list(store.jobs()) == ["kept-1"]
    record = look(store, store.jobs()["kept-1"])
    assert record.state == "submitting" and "not submitted yet" in record.reason


def test_a_port_where_no_ray_answers_is_told_and_not_waited_for(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        line.listen()
        address = f"127.0.0.1:{line.getsockname()[1]}"
        monkeypatch.setattr(ray_driver, "_ANSWER_S", 0.5)
        with pytest.raises(TargetLost, match="is no Ray head, or hangs"):
            launching.launch(gang("silent", address), "ray", store)

        def answer() -> None:
            for _ in range(3):  # the first has hung up
                with line.accept()[0] as other, suppress(OSError):
                    other.recv(99)
                    other.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        for name, scheme in (("web", ""), ("client", "ray://")):
            with pytest.raises(TargetLost, match="is no Ray head, or hangs"):
                launching.launch(gang(name, scheme + address), "ray", store)
        thread.join()
    with pytest.raises(TargetLost, match="Connection refused"):
        launching.launch(gang("gone", f"ray://127.0.0.1:{free_port()}"), "ray", store)
    assert {one.state for one in store.jobs().values()} == {"submitting"}


@pytest.mark.thorough
def test_a_token_that_the_head_does_not_take_is_named(store: JobStore, tmp_path: Path) -> None:
    port = free_port()
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
    ray = Path(sys.executable).with_name("ray")
    options = [
        "--num-cpus",
        "0",
        "--object-store-memory",
        "80000000",
        "--include-dashboard",
        "false",
        "--block",
    ]
    with (tmp_path / "head.log").open("wb") as log:
        head = subprocess.Popen(
            [ray, "start", "--head", "--port", str(port), *options], stdout=log, stderr=log,
            env=environment | {"RAY_AUTH_TOKEN": "a" * 32},
        )  # fmt: skip
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(plain_job(gang("kept", f"127.0.0.1:{port}"))))
    try:
        wait_for(lambda: "Ray runtime started" in (tmp_path / "head.log").read_text(), "the head")
        done = subprocess.run(
            [sys.executable, "-m", "cumulo", "launch", job, "--on", "ray", "--store", store.folder],
            env=environment | {"RAY_AUTH_TOKEN": "b" * 32}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        head.terminate()
        head.wait(300)
    assert done.returncode == 2 and "check that RAY_AUTH_TOKEN is right" in done.stderr, done.stderr
    assert store.find("kept").state == "submitting"


@pytest.mark.thorough
def test_a_gang_goes_on_after_its_node_died_and_another_one_waits_whole(
    cluster: RayCluster, store: JobStore
) -> None:
    first, _ = launching.launch(gang("first", cluster.address), "ray", store)
    wait_for(lambda: look(store, first).state == "running", "the first gang")
    second, _ = launching.launch(gang("second", cluster.address), "ray", store)
    log = run_folder(first) / "log.csv"
    sizes = set()

    def watched(done: bool) -> bool:
        """Also: at no moment is a gang half placed."""
        for record in launching.refreshed(store)[0]:
            sizes.add((record.state, len(record.places)))
        return done

    wait_for(lambda: watched(len(read_log(log)) >= 12), "12 steps of the first gang")
    assert "needs 4 tasks on different nodes" in look(store, second).reason
    cluster.kill(cluster.workers[1])
    wait_for(lambda: watched(store.jobs()[first.job_id].state == "queued"), "the loss of the node")
    assert len(read_log(log)) < 40
    cluster.workers.append(cluster.add())
    for record in (first, second):
        wait_for(lambda record=record: watched(store.jobs()[record.job_id].ended), record.job_id)  # type: ignore[misc]
        assert look(store, record).state == "done", output(record)
    assert {size for state, size in sizes if state == "running"} == {4}
    assert {size for state, size in sizes if state == "queued"} == {0}
    losses, undisturbed = ([one.loss for one in read_log(run_folder(record) / "log.csv")]
                           for record in (first, second))  # fmt: skip
    assert len(losses) == 40
    assert losses == undisturbed  # to the last bit
    assert "resuming after step" in output(first)


@pytest.mark.thorough
def test_an_elastic_gang_goes_on_with_the_nodes_that_are_left(cluster: RayCluster, store: JobStore) -> None:
    record, _ = launching.launch(gang("elastic", cluster.address, elastic={"min": 2, "max": 4}), "ray", store)
    log = run_folder(record) / "log.csv"
    wait_for(lambda: len(read_log(log)) >= 12, "12 steps")
    cluster.kill(cluster.workers[1])
    wait_for(lambda: look(store, record).ended, "the end")
    assert look(store, record).state == "done", output(record)
    assert [one.step for one in read_log(log)] == list(range(1, 41))


def _ask(url: str, number: int, tokens: int, results: list[Any]) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": f"Count from {number}."}], max_tokens=tokens,
            temperature=0, stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        pieces = [piece.choices[0].delta.content or "" for piece in stream if piece.choices]
        results.append("".join(pieces))
    except openai.OpenAIError as error:
        results.append(error)


@pytest.mark.thorough
@needs_built_in_model
def test_a_service_with_two_replicas_loses_a_node_and_no_request(store: JobStore, tiny_model: Path) -> None:
    with RayCluster(head_cores=0) as cluster:
        record, _ = launching.launch(service(tiny_model, cluster.address, replicas=2), "ray", store)
        wait_for(lambda: len(look(store, record).places) == 2 or look(store, record).ended, "two replicas")
        url = look(store, record).url
        assert url, look(store, record).reason
        alone: list[Any] = []
        _ask(url, 0, 200, alone)
        results: list[Any] = []
        askers = [threading.Thread(target=_ask, args=(url, number % 4, 200, results)) for number in range(12)]
        for asker in askers:
            asker.start()
        cluster.kill(cluster.worker_with("EngineReplica"))
        for asker in askers:
            asker.join(PATIENCE_S)
        assert [one for one in results if isinstance(one, Exception)] == []
        assert (
            len(results) == 12 and results.count(alone[0]) == 3
        )  # the same text as of an undisturbed request
        wait_for(lambda: len(look(store, record).places) == 2, "the lost replica's successor")
        launching.cancel(store, record.job_id)
        assert look(store, record).state == "cancelled"


def burst_of_azure() -> list[float]:
    """When every twentieth request of a burst of Azure's code trace came, in seconds; silence follows."""
    from cumulo.cli.shared.plan_options import TrafficOptions

    times = [one.arrived_s for one in TrafficOptions(trace=AZURE_CODE).traffic(1 << 20).arrivals]
    burst = [one - 840.0 for one in times if 840.0 <= one < 950.0]
    return burst[::20]


@pytest.mark.thorough
@needs_built_in_model
@pytest.mark.skipif(not AZURE_CODE.exists(), reason="Azure's trace is not at hand")
def test_replicas_follow_a_replayed_trace_up_and_down_to_zero_and_back(
    store: JobStore, tiny_model: Path
) -> None:
    autoscale = {
        "prompt_tok_s": 20_000, "output_tok_s": 10, "start_up_s": 5, "interval_s": 1, "cooldown_s": 20, "ttft_s": 5,
        "idle_s": 30,
    }  # fmt: skip
    more = {"replicas": 1, "min_replicas": 0, "max_replicas": 3, "autoscale": autoscale}
    sizes: list[int] = []
    with RayCluster(head_cores=0) as cluster:
        record, _ = launching.launch(service(tiny_model, cluster.address, **more), "ray", store)

        def ready() -> int:
            count = len(look(store, record).places)
            if not sizes or sizes[-1] != count:
                sizes.append(count)
            return count

        wait_for(lambda: ready() == 1 or look(store, record).ended, "one replica")
        url, results, askers = look(store, record).url, list[Any](), []
        assert url, look(store, record).reason
        begin_s = time.monotonic()
        # The burst again and again, because on a busy machine a replica may start for longer than it lasts.
        bursts = (110.0 * again + one for again in range(30) for one in burst_of_azure())
        for arrival_s in bursts:
            if ready() == 3:
                break
            time.sleep(max(0.0, begin_s + arrival_s - time.monotonic()))
            asker = threading.Thread(target=_ask, args=(url, len(askers), 40, results))
            asker.start()
            askers.append(asker)
        for asker in askers:
            asker.join(PATIENCE_S)
        wait_for(lambda: ready() == 0, "no replica after half a minute without a request")
        assert max(sizes) == 3, (sizes, look(store, record).reason)
        _ask(url, 1, 8, results)  # waits for a replica
        assert [one for one in results if isinstance(one, Exception)] == []
        assert len(results) == len(askers) + 1
        launching.cancel(store, record.job_id)


@pytest.mark.thorough
def test_a_head_that_dies_under_a_job_is_named_and_the_job_goes_on_with_the_next_head(
    store: JobStore,
) -> None:
    port = free_port()
    alone = {"devices": {"count": 2, "kind": "cpu"}, "train": {"config": "train-tiny.yaml"}}
    with RayCluster(port=port, head_cores=2, workers=0) as first:
        record, _ = launching.launch(gang("alone", first.address, **alone), "ray", store)
        log = run_folder(record) / "log.csv"
        wait_for(lambda: len(read_log(log)) >= 12 and look(store, record).state == "running", "12 steps")
        first.kill_all()
        _, silent = launching.refreshed(store)
        assert "does not answer" in silent[0] and "alone-1 was running and ended with it" in silent[0]
        assert "resumes from its last checkpoint" in store.jobs()[record.job_id].reason
        done = len(read_log(log))
    with RayCluster(port=port, head_cores=2, workers=0):
        wait_for(lambda: look(store, record).ended, "the end with another head")
    assert look(store, record).state == "done", output(record)
    assert done < 40 and [one.step for one in read_log(log)] == list(range(1, 41))
    assert "resuming after step" in output(record)
    assert list(store.jobs()) == ["alone-1"]


_STAYS = """
import sys
from types import SimpleNamespace

from cumulo.cluster.drivers.ray import connected

record = SimpleNamespace(job=SimpleNamespace(ray=SimpleNamespace(address=sys.argv[1])))
ray = connected(record)
print("connected", flush=True)
sys.stdin.readline()
for _ in range(2):
    try:
        ray.get_actor("nobody")
    except ray.exceptions.GetTimeoutError:
        print("no answer", flush=True)
"""


@pytest.mark.thorough
def test_a_process_outlives_the_head_that_it_asked() -> None:
    """As a server, in whose console somebody opened the jobs once. Ray waits 60 s for a head."""
    environment = os.environ | {"RAY_gcs_server_request_timeout_seconds": "40"}
    environment.pop("RAY_gcs_rpc_server_reconnect_timeout_s", None)
    with RayCluster(port=free_port(), workers=0) as cluster:
        asks = subprocess.Popen(
            [sys.executable, "-c", _STAYS, cluster.address], env=environment, text=True, cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        with asks:
            assert asks.stdout is not None
            assert asks.stdout.readline() == "connected\n"
            cluster.kill_all()
            told, trouble = asks.communicate("go on\n")
    assert asks.returncode == 0, trouble
    assert told.splitlines() == ["no answer"] * 2
