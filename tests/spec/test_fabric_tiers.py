"""Tiers of switches: cumulo/spec/cluster.py."""

import pytest

from cumulo.errors import ConfigError
from cumulo.spec import catalog
from cumulo.spec.cluster import Fabric, tiers_of

NODE = catalog.node("dgx-h100")


def fabric(kind="rail", ports=64, oversubscription=(1.0,)):
    return Fabric("test", kind, "infiniband", ports, oversubscription)


def test_one_switch_per_rail_joins_as_many_nodes_as_it_has_ports():
    (leaf,) = tiers_of(fabric(), NODE, 64)
    assert (leaf.nodes, leaf.oversubscription) == (64, 1.0)


def test_a_fat_tree_of_k_port_switches_holds_the_textbook_number_of_hosts():
    """k²/2 cards with two tiers, k³/4 with three (Al-Fares et al. 2008)."""
    assert tiers_of(fabric("fat-tree"), NODE, 200)[-1].nodes == 64 * 64 // 2 // 8
    assert tiers_of(fabric("fat-tree"), NODE, 5000)[-1].nodes == 64**3 // 4 // 8


def test_a_rail_fabric_holds_eight_times_the_nodes_with_the_same_tiers():
    assert tiers_of(fabric("rail"), NODE, 2000)[-1].nodes == 64 * 64 // 2
    assert len(tiers_of(fabric("rail"), NODE, 2000)) == 2


def test_oversubscription_multiplies_up_the_tiers_and_gives_leaves_more_nodes():
    leaf, spine, core = tiers_of(fabric("rail", 64, (3.0, 2.0)), NODE, 5000)
    assert (leaf.nodes, leaf.down_ports, leaf.up_ports) == (48, 48, 16)
    assert (leaf.oversubscription, spine.oversubscription, core.oversubscription) == (3.0, 6.0, 1.0)


def test_a_dragonfly_is_balanced_as_kim_et_al_say():
    switch, group, everything = tiers_of(fabric("dragonfly", ports=63), NODE, 1000)
    h = 16  # 4h − 1 ports
    assert switch.nodes == h // 8
    assert group.nodes == 2 * h * h // 8
    assert everything.nodes == group.nodes * (2 * h * h + 1)


def test_what_cannot_be_built_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match="more ports"):
        tiers_of(fabric(ports=4), NODE, 100_000)
    with pytest.raises(ConfigError, match="kind: rail"):
        tiers_of(fabric("fat-tree", ports=8), NODE, 100)
    with pytest.raises(ConfigError, match="dragonfly of 8-port"):
        tiers_of(fabric("dragonfly", ports=8), NODE, 100_000)
