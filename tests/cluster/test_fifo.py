"""First come, first served, on small clusters one can check by hand."""

from cumulo.cluster.decide.decisions import JobPlacement, Waits
from cumulo.cluster.decide.jobs import JobRequest, RunningJob, TaskPlace
from cumulo.cluster.decide.nodes import ClusterNode
from cumulo.cluster.decide.queueing import fifo
from cumulo.cluster.decide.snapshot import snapshot_of

NODES = [ClusterNode(f"n{number}", gpus=4) for number in range(3)]


def test_a_gang_that_does_not_fit_waits_and_nobody_overtakes_it():
    running = RunningJob(JobRequest("old", 1, 4), (TaskPlace("n0", (0, 1, 2, 3)),))
    jobs = [JobRequest("big", 3, 4), JobRequest("small", 1, 1)]
    decided = fifo(snapshot_of(0, NODES, jobs, [running]))
    assert decided == [Waits("big", "the gang needs 3 tasks with 4 GPUs each; 2 fit now")]


def test_shares_of_a_gpu_lie_together_and_gangs_on_few_nodes():
    jobs = [JobRequest("a", gpu_milli=300), JobRequest("b", gpu_milli=300), JobRequest("c", 4, 2)]
    first, second, third = fifo(snapshot_of(0, NODES, jobs, []))
    assert isinstance(first, JobPlacement) and isinstance(second, JobPlacement)
    assert first.places == second.places
    assert isinstance(third, JobPlacement)
    assert [place.node for place in third.places] == ["n1", "n1", "n2", "n2"]
