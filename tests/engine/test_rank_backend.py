"""By which means ranks exchange numbers: the rule, its reasons, and what it refuses."""

import pytest

from cumulo.engine.config import EngineConfig
from cumulo.engine.decide.rank_backend import RankPlaces, choose_backend
from cumulo.errors import ConfigError, CumuloError

GPUS = RankPlaces("cuda", own_ranks=2, gpus=8, has_nccl=True)
HOSTS = RankPlaces("cuda", own_ranks=8, remote_ranks=8, gpus=8, has_nccl=True)
SHARED = RankPlaces("cuda", own_ranks=2, gpus=1, has_nccl=True)
CPUS = RankPlaces("cpu", own_ranks=2)


@pytest.mark.parametrize(
    ("asked", "places", "backend", "why"),
    [
        ("auto", GPUS, "symmetric", "all ranks are on one host"),
        ("auto", SHARED, "symmetric", "all ranks are on one host"),
        ("auto", HOSTS, "nccl", r"other hosts \(8\)"),
        ("auto", RankPlaces("cuda", 1, 1, 1, False), "gloo", "has no NCCL"),
        ("auto", RankPlaces("cuda", 2, 1, 1, True), "gloo", "2 ranks share 1 GPU here, which NCCL refuses"),
        ("auto", CPUS, "gloo", "on CPUs"),
        ("gloo", CPUS, "gloo", "on CPUs"),
        ("nccl", GPUS, "nccl", "as asked for"),
        ("gloo", SHARED, "gloo", "as asked for"),
        ("symmetric", GPUS, "symmetric", "as asked for"),
    ],
)
def test_the_backend_follows_from_where_ranks_are(asked, places: RankPlaces, backend: str, why: str) -> None:
    chosen = choose_backend(asked, places)
    assert chosen.backend == backend
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(str(chosen))


@pytest.mark.parametrize(
    ("asked", "places", "why"),
    [
        ("symmetric", HOSTS, "cannot read this host's GPU memory; use nccl"),
        ("symmetric", CPUS, "needs ranks on GPUs, and these run on CPUs: use gloo"),
        ("nccl", CPUS, "needs ranks on GPUs, and these run on CPUs: use gloo"),
        ("nccl", SHARED, "one rank per GPU; start at most 1 ranks on this host, or use gloo"),
        ("nccl", RankPlaces("cuda", 2, 0, 2, False), "built without NCCL; install a CUDA build"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(asked, places: RankPlaces, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        choose_backend(asked, places)


def test_a_backend_is_for_several_ranks_and_one_of_those_that_exist() -> None:
    assert EngineConfig(tp=2, rank_backend="gloo").rank_backend == "gloo"
    with pytest.raises(CumuloError, match="add tp, pp, dp or ep"):
        EngineConfig(rank_backend="gloo")
    with pytest.raises(CumuloError, match="symmetric, nccl or gloo; got 'mpi'"):
        EngineConfig(tp=2, rank_backend="mpi")  # type: ignore[arg-type]
