"""Switches and cables counted, and where traffic goes: cumulo/plan/cluster/fabric.py."""

import pytest

from cumulo.layout.layout import Layout
from cumulo.plan.cluster.fabric import count_switches, traffic_of
from cumulo.plan.cluster.sheet import Sheet
from cumulo.plan.job import TrainJob
from cumulo.plan.network.collectives import Network
from cumulo.spec import catalog
from cumulo.spec.cluster import Cluster, Fabric

NODE = catalog.node("dgx-h100")


def counted(nodes, kind="fat-tree", ports=64, oversubscription=(1.0,)):
    cluster = Cluster(NODE, nodes * NODE.gpus, Fabric("test", kind, "infiniband", ports, oversubscription))
    sheet = Sheet()
    sheet.given("nodes", nodes, "", "", "test")
    sheet.given("gpus_per_node", NODE.gpus, "", "", "test")
    sheet.given("nic_bytes_per_s", NODE.nic_bytes_per_s, "", "", "test")
    return count_switches(cluster, Network(cluster).tiers, sheet), sheet


def test_a_full_three_tier_fat_tree_has_the_textbook_number_of_switches():
    """5k²/4 switches of k ports for k³/4 hosts (Al-Fares et al. 2008)."""
    k = 64
    tiers, sheet = counted(k**3 // 4 // 8)
    assert [tier.switches for tier in tiers] == [k * k // 2, k * k // 2, k * k // 4]
    assert sheet["switches"] == 5 * k * k // 4
    assert sheet["cables"] == 3 * k**3 // 4


def test_a_rail_fabric_needs_as_many_leaves_and_fewer_tiers():
    tiers, _ = counted(1024, kind="rail")
    assert [tier.switches for tier in tiers] == [8 * 32, 128]
    assert tiers[0].bytes_per_s_down == 8192 * 50e9
    assert len(counted(1024, kind="fat-tree")[0]) == 3


def test_oversubscription_saves_switches_and_cables_above_the_leaves():
    full, _ = counted(1024, kind="rail")
    thin, _ = counted(1024, kind="rail", oversubscription=(3.0,))
    assert thin[1].cables_down == pytest.approx(full[1].cables_down / 3, rel=0.05)
    assert thin[1].switches < full[1].switches / 2


def test_a_dragonfly_has_one_switch_for_every_h_cards():
    tiers, sheet = counted(2056, kind="dragonfly", ports=63)
    assert sheet["switches"] == 2056 * 8 / 16
    assert [tier.cables_down for tier in tiers] == [16448, 1028 * 31 // 2, 1028 * 8]


def test_axes_are_those_of_the_mesh():
    layout = Layout(dp=4, tp=2, pp=3, cp=2, ep=4)
    for axis, (ranks, stride) in layout.axes.items():
        members = layout.group({"dp": "data"}.get(axis, axis), 0)
        assert members == tuple(rank * stride for rank in range(ranks)), axis


def test_traffic_is_placed_by_how_far_its_group_reaches():
    layout = Layout(dp=64, tp=8, pp=8, zero=1, sequence_parallel=True)
    job = TrainJob(catalog.model("llama-3.1-70b"), layout, global_batch=512, sequence_length=4096)
    network = Network(catalog.cluster(4096, "h100-sxm"))
    sheet = Sheet()
    for name, value in (("step_s", 2.0), ("link_bytes_per_s", 450e9), ("nic_bytes_per_s", 50e9)):
        sheet.given(name, value, "", "", "test")
    found = traffic_of(job, network, {"tp": 90e9, "pp": 1e9, "dp": 10e9}, sheet)
    assert [(line.axis, line.where) for line in found] == [
        ("tp", "scale-up"),
        ("dp", "spine"),
        ("pp", "spine"),
    ]
    assert sheet["tp_share"] == pytest.approx(0.1)
    assert sheet["dp_share"] == pytest.approx(0.1)


def test_experts_send_most_of_their_tokens_to_other_nodes():
    """Of 32 members in nodes of 8, 24 of the 31 others are elsewhere: an all-to-all is not a ring, of whose members
    in a node one sends on."""
    model = catalog.model("deepseek-v3")
    job = TrainJob(model, Layout(dp=64, ep=32), global_batch=64, sequence_length=4096)
    sheet = Sheet()
    for name, value in (("step_s", 2.0), ("nic_bytes_per_s", 50e9), ("link_bytes_per_s", 450e9)):
        sheet.given(name, value, "", "", "test")
    traffic_of(job, Network(catalog.cluster(64, "h100-sxm")), {"ep": 31e9}, sheet)
    assert sheet["ep_share"] == pytest.approx(24e9 / 2 / 50e9)
