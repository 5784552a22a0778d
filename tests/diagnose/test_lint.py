"""`cumulo network lint`: cumulo/diagnose/lint."""

from dataclasses import replace

import numpy as np

from cumulo.diagnose.lint import fabric_rules as rules
from cumulo.diagnose.lint.pfc import flows_of, lint_pfc, lint_victims
from cumulo.diagnose.lint.settings import lint_settings, settings_of
from cumulo.spec import catalog

ROCE, RAIL = catalog.fabric("fat-tree-roce"), catalog.fabric("rail-roce")


def test_a_deadlock_is_an_error_that_names_its_circle_and_a_circle_alone_is_a_warning() -> None:
    content = {"flows": {"F1": "L0 -> S0 -> L2", "F2": ["L2", "S1", "L0"], "F3": "L1 → S0 → L2"}}
    (error,) = lint_pfc(*flows_of(content))
    assert (
        error.severity == "error"
        and "L0 → S0 → L2 → S1 → L0" in error.what
        and "S0 → L2 (2 times" in error.what
    )
    del content["flows"]["F3"]
    (warning,) = lint_pfc(*flows_of(content))
    assert warning.severity == "warning" and "safe with these flows" in warning.what


def test_a_victim_is_named() -> None:
    flows = {f"busy{n}": f"e{n} -> m -> out" for n in range(3)} | {"victim": "e0 -> other"}
    (found,) = lint_victims(*flows_of({"flows": flows}))
    assert "victim passes no overloaded link" in found.what


def test_up_and_down_routing_has_no_circle_of_buffers() -> None:
    cluster = catalog.cluster(512, "h100-sxm", fabric="fat-tree-infiniband")
    flows = rules.lint_loops(cluster, rules.data_groups(512, 8, 64))
    assert len(flows) > 50
    (note,) = lint_pfc(flows, kind="per-port")
    assert note.severity == "note"


def test_collisions_come_with_an_interval_and_more_queue_pairs_gain() -> None:
    cluster = catalog.cluster(256, "h100-sxm", fabric="fat-tree-roce")
    (found,) = rules.lint_collisions(cluster, rules.data_groups(256, 8, 32))
    assert (
        found.severity == "warning"
        and found.low is not None
        and found.value is not None
        and found.high is not None
    )
    assert 1 <= found.low <= found.value <= found.high
    (near,) = rules.lint_collisions(
        catalog.cluster(64, "h100-sxm", fabric="rail-roce"), rules.data_groups(64, 8, 8)
    )
    assert near.severity == "note"


def test_an_oversubscribed_tier_matters_where_groups_pass_it() -> None:
    fabric = replace(ROCE, oversubscription=(1.0, 7.0), switch_ports=32)
    cluster = replace(catalog.cluster(2048, "h100-sxm"), fabric=fabric)
    packed, scattered = np.arange(2048).reshape(-1, 32), np.arange(2048).reshape(32, -1).T
    assert all(one.severity == "note" for one in rules.lint_tiers(cluster, packed))
    assert any(
        one.severity == "warning" and "7 : 1" in one.what for one in rules.lint_tiers(cluster, scattered)
    )


def test_rails_are_crossed_where_groups_do_not_fill_nodes() -> None:
    cluster = catalog.cluster(64, "h100-sxm", fabric="rail-roce")
    assert not list(rules.lint_rails(cluster, rules.data_groups(64, 8, 8), "dp"))
    (found,) = rules.lint_rails(cluster, rules.data_groups(64, 4, 16), "dp")
    assert found.value == 1.0  # every hop between nodes goes from one half of a node to the other


def test_incast_at_a_checkpoint_is_counted() -> None:
    cluster = catalog.cluster(2048, "h100-sxm", fabric="rail-roce")
    (found,) = rules.lint_incast(cluster, 5e12, 16, 200.0, 30.0)
    assert found.severity == "warning" and "256 nodes write to 16 storage links" in found.what
    assert not list(rules.lint_incast(cluster, 5e12, 2048, 400.0, 30.0))


def test_settings_that_cost_bandwidth_are_found_and_good_ones_are_not() -> None:
    bad = """
    export NCCL_IB_DISABLE=1
    NCCL_P2P_LEVEL=LOC
    NCCL_SOCKET_IFNAME="docker0"
    NCCL_IB_GID_INDEX=0
    NCCL_IB_TC=26
    NCCL_IB_HCA=mlx5_0
    NCCL_ALGO=Ring
    NCCL_IB_TIMEOUT=14
    NCCL_CROSS_NIC=1
    NCCL_IB_QPS_PER_CONECTION=4
    NCCL_MAX_NCHANNELS=1
    NCCL_BUFFSIZE=65536
    MTU=1500
    """
    found = list(lint_settings(settings_of(bad), RAIL))
    assert {one.rule for one in found} >= {
        "nccl-setting", "nccl-interface", "roce-gid", "roce-traffic-class", "nccl-hca", "nccl-pinned",
        "nccl-timeout", "rails-crossed", "nccl-name", "mtu", "ecmp-collisions", "nccl-limit",
    }  # fmt: skip
    assert all(one.change and one.gain for one in found)
    few = {"NCCL_IB_TC": "0", "NCCL_IB_RETRY_CNT": "0"}
    assert {one.rule for one in lint_settings(few, RAIL)} >= {"roce-traffic-class", "nccl-timeout"}
    good = "NCCL_IB_HCA=mlx5\nNCCL_IB_GID_INDEX=3\nNCCL_IB_TC=106\nNCCL_IB_QPS_PER_CONNECTION=4\nMTU=9000\n"
    assert not list(lint_settings(settings_of(good), RAIL))
