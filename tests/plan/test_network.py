"""What a collective costs: cumulo/plan/network/collectives.py, plan/network/lines.py."""

import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cumulo.errors import ConfigError
from cumulo.plan.network.collectives import Network, chosen, collective_s
from cumulo.plan.network.lines import Kind
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster, Fabric
from tests import thorough

GIB = 2**30
KINDS = get_args(Kind)
H100 = Network(catalog.cluster(4096, "h100-sxm"))


def test_the_worked_example_of_the_documentation_an_all_reduce_of_1_gib_in_a_node():
    group = H100.group(8)
    line = chosen("all_reduce", GIB, group)
    assert (line.algorithm, line.protocol) == ("nvls", "simple")
    assert line.latency_s == pytest.approx(8 * 8.91e-6)
    assert collective_s("all_reduce", GIB, group) == pytest.approx(8 * 8.91e-6 + GIB / (0.586 * 450e9))
    assert collective_s("all_reduce", GIB, group) * 1e3 == pytest.approx(4.14, abs=0.01)  # a p5 node: 4.25 ms


def test_the_worked_example_of_the_documentation_gradients_over_64_nodes():
    group = H100.group(64, stride=8)  # tp 8: one member in each node, one card each
    ring = next(line for line in group.lines["reduce_scatter"] if line.protocol == "simple")
    latency = 30.1e-6 + 63 * (14e-6 + 2 * 2e-6)
    s_per_byte = 63 / 64 / (0.965 * 50e9) + 1 / (64 * 0.291 * 3.35e12)
    assert ring.latency_s == pytest.approx(latency)
    assert ring.s_per_byte == pytest.approx(s_per_byte)
    assert collective_s("reduce_scatter", GIB, group) * 1e3 == pytest.approx(23.1, abs=0.1)


def test_a_group_knows_how_many_of_its_members_share_a_scale_up_domain():
    assert (H100.group(8).reach.per_domain, H100.group(8).reach.domains) == (8, 1)
    assert (H100.group(64).reach.per_domain, H100.group(64).reach.domains) == (8, 8)
    assert (H100.group(16, stride=2).reach.per_domain, H100.group(16, stride=2).reach.domains) == (4, 4)
    assert (H100.group(16, stride=8).reach.per_domain, H100.group(16, stride=8).reach.domains) == (1, 16)
    rack = Network(catalog.cluster(144, "gb200"))
    assert (rack.group(72).reach.per_domain, rack.group(144).reach.domains) == (72, 2)


def test_groups_that_do_not_divide_a_domain_lie_across_its_border():
    assert (H100.group(4).reach.domains, H100.group(5).reach.domains, H100.group(2, 3).reach.domains) == (
        1,
        2,
        2,
    )
    assert collective_s("all_reduce", GIB, H100.group(5)) > collective_s("all_reduce", GIB, H100.group(8))


def test_jobs_leave_nodes_of_a_rack_empty_so_that_groups_stay_inside():
    racks = Network(
        catalog.cluster(256, "gb200")
    )  # 64 GPUs in each of four racks of 72, as published runs have it
    assert (racks.group(32).reach.domains, racks.group(64).reach.domains) == (1, 1)
    assert racks.group(5).reach.domains == 2  # no whole nodes of 4


def test_one_rank_alone_costs_nothing():
    assert all(collective_s(kind, GIB, H100.group(1)) == 0 for kind in KINDS)


@given(
    kind=st.sampled_from(KINDS),
    ranks=st.integers(2, 512),
    stride=st.sampled_from([1, 2, 4, 8, 64]),
    size=st.integers(1, 8 * GIB),
)
def test_no_collective_is_faster_than_its_links_and_larger_ones_take_longer(kind, ranks, stride, size):
    group = H100.group(ranks, stride)
    seconds = collective_s(kind, size, group)
    reach = group.reach
    if reach.domains == 1:
        part = {"send_recv": 1.0, "broadcast": 1.0, "all_reduce": 1.0}.get(kind, (ranks - 1) / ranks)
        least = part * size / 450e9
    else:  # what must at least leave a domain, over all the cards of its members
        leaves = {"all_to_all": (1 - reach.per_domain / ranks) * reach.per_domain * size}.get(kind, size / 2)
        least = leaves / (reach.per_domain * 50e9)
    assert seconds > least
    assert collective_s(kind, 2 * size, group) > seconds


@settings(max_examples=thorough.examples(32))  # each plans three collectives, of up to 1,024 ranks
@given(ranks=st.integers(2, 1024), stride=st.sampled_from([1, 8]), size=st.integers(1024, GIB))
def test_an_all_reduce_is_never_dearer_than_scattering_and_gathering(ranks, stride, size):
    group = H100.group(ranks, stride)
    both = collective_s("reduce_scatter", size, group) + collective_s("all_gather", size, group)
    assert (
        collective_s("all_reduce", size, group) <= both * 1.05
    )  # those two copy, but start more than one ring


def test_leaving_the_scale_up_domain_is_dearer_than_staying_in_it():
    for kind in KINDS:
        assert collective_s(kind, GIB, H100.group(8, stride=8)) > 2 * collective_s(kind, GIB, H100.group(8))


def test_integers_are_not_added_by_the_switch():
    group = H100.group(8)
    assert chosen("all_reduce", GIB, group, in_switch=False).algorithm == "ring"
    assert chosen("all_reduce", GIB, group, in_switch=False).seconds(GIB) > collective_s(
        "all_reduce", GIB, group
    )


def test_short_messages_take_ll_and_long_ones_simple_as_nccl_does():
    group = H100.group(4)
    used = [chosen("all_gather", size, group).protocol for size in (1024, 8 * 2**20, GIB)]
    assert used == ["ll", "ll128", "simple"]


def test_oversubscription_slows_an_all_to_all_across_leaves_but_not_a_ring_of_neighbours():
    def network(ratio):
        node = catalog.node("dgx-h100")
        return Network(Cluster(node, 4096, Fabric("test", "rail", "infiniband", 64, (ratio,))))

    full, thin = network(1.0), network(4.0)
    size = GIB
    assert collective_s("all_gather", size, thin.group(1024)) == pytest.approx(
        collective_s("all_gather", size, full.group(1024))
    )
    slower = collective_s("all_to_all", size, thin.group(1024)) / collective_s(
        "all_to_all", size, full.group(1024)
    )
    assert 2 < slower <= 4
    # Members of different leaves: every step of their ring goes up.
    far = collective_s("all_gather", size, thin.group(4, stride=1024))
    assert far / collective_s("all_gather", size, full.group(4, stride=1024)) == pytest.approx(4, rel=0.05)


def test_every_device_of_the_catalogue_has_costs():
    for name in catalog.shipped().names("nodes"):
        node = catalog.node(name)
        network = Network(Cluster(node, 2 * node.gpus, catalog.fabric("rail-infiniband")))
        for kind in KINDS:
            assert 0 < collective_s(kind, 1e6, network.group(2 * node.gpus)) < 1


def test_a_group_without_ranks_is_refused():
    with pytest.raises(ConfigError, match="1 or more ranks"):
        H100.group(0)


def test_the_network_model_imports_no_torch():
    code = "import sys, cumulo.plan.network.collectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
