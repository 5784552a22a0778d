"""`cumulo topology`: cumulo/collectives/topology."""

from pathlib import Path

import pytest
import yaml

from cumulo.collectives.topology.draw import draw_machine
from cumulo.collectives.topology.machine_graph import MachineGraph
from cumulo.collectives.topology.readers import parse_nccl_xml, parse_topo, read_machine
from cumulo.collectives.topology.rings import find_rings
from cumulo.errors import ConfigError
from cumulo.spec.catalog import Catalog

H100 = Path(__file__).parents[2] / "examples/network/topo_h100.txt"
# Two GPUs below one PCIe switch with a card, two below another CPU; NVLinks to switches.
XML = """<system version="1">
  <cpu numaid="0" affinity="ffff" arch="x86_64" vendor="GenuineIntel">
    <pci busid="0000:10:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
      <pci busid="0000:1b:00.0" class="0x030200"><gpu dev="0" sm="90" rank="0" gdr="1">
        <nvlink target="0000:c0:00.0" count="9" tclass="0x068000"/><nvlink target="0000:c1:00.0" count="9"
        tclass="0x068000"/>
      </gpu></pci>
      <pci busid="0000:1c:00.0" class="0x020700"><nic>
        <net name="mlx5_0" dev="0" speed="400000" port="1" gdr="1"/></nic></pci>
    </pci>
  </cpu>
  <cpu numaid="1"><pci busid="0000:90:00.0" class="0x060400"><pci busid="0000:9b:00.0" class="0x030200">
    <gpu dev="1" sm="90" rank="1" gdr="1"><nvlink target="0000:c0:00.0" count="18"
    tclass="0x068000"/></gpu></pci></pci>
  </cpu>
</system>"""


def test_the_table_of_nvidia_smi_is_read() -> None:
    machine = parse_topo(H100.read_text())
    assert len(machine.gpus) == 8 and len(machine.cards) == 10 and machine.numa_nodes == 2
    assert machine.near[0, 7] == "NV18" and machine.domain == 8 and machine.switched
    assert [machine.cards[machine.nearest_card(gpu) or 0].name for gpu in range(8)] == [
        f"mlx5_{n}" for n in range(8)
    ]
    assert not machine.complaints()


def test_nccls_xml_is_read() -> None:
    machine = parse_nccl_xml(XML)
    assert machine.near[0, 1] == "NV18" and machine.compute_capability == 90
    assert machine.card_near == {(0, 0): "PIX", (1, 0): "SYS"} and machine.cards[0].gbps == 400
    assert machine.complaints() == [
        "GPU1 reaches every network card through the link between CPUs (SYS): no GPUDirect RDMA"
    ]
    with pytest.raises(ConfigError, match="no document type"):
        parse_nccl_xml("<!DOCTYPE x><system/>")


def test_a_machine_becomes_a_node_of_the_planners_catalogue(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_text(yaml.safe_dump(parse_topo(H100.read_text()).entry("mine")))
    node = Catalog.load(file).node("mine")
    assert node.gpus == node.scale_up_gpus == 8 and node.nic_bytes_per_s == 50e9


def mesh(pairs: dict[tuple[int, int], int]) -> MachineGraph:
    from cumulo.collectives.topology.machine_graph import GpuPlace

    near = {(a, b): f"NV{n}" for (a, b), n in pairs.items()} | {
        (b, a): f"NV{n}" for (a, b), n in pairs.items()
    }
    return MachineGraph(tuple(GpuPlace(f"GPU{n}") for n in range(8)), (), near, {}, 70)


def test_rings_of_a_dgx_1_use_every_link_no_more_than_it_has() -> None:
    """The hybrid cube mesh of eight V100, six links each."""
    machine = mesh({
        (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1, (2, 6): 2,
        (3, 7): 2,
        (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1,
    })  # fmt: skip
    rings = find_rings(machine)
    assert rings.total_gbps >= 60
    used: dict[tuple[int, int], float] = {}
    for order in rings.orders:
        assert sorted(order) == list(range(8))
        for at, one in enumerate(order):
            pair = (one, order[(at + 1) % 8])
            used[pair] = used.get(pair, 0.0) + rings.gbps
    assert all(load <= machine.pair_gbps(*pair) + 1e-9 for pair, load in used.items())


def test_rings_through_switches_reach_the_links_of_a_gpu() -> None:
    rings = find_rings(parse_topo(H100.read_text()))
    assert 18 * 20.6 * 0.9 <= rings.total_gbps <= 18 * 20.6


def test_sysfs_is_read(tmp_path: Path) -> None:
    def device(path: str, **files: str) -> Path:
        folder = tmp_path / "devices" / path
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name.replace("class_", "class")).write_text(text)
        return folder

    gpu = device(
        "pci0000:10/0000:10:01.0/0000:11:00.0", class_="0x030200\n", vendor="0x10de\n", numa_node="0\n"
    )
    card = device(
        "pci0000:10/0000:10:01.0/0000:12:00.0", class_="0x020700\n", vendor="0x15b3\n", numa_node="0\n"
    )
    (tmp_path / "devices/system/node/node0").mkdir(parents=True)
    pci = tmp_path / "bus/pci/devices"
    pci.mkdir(parents=True)
    for one in (gpu, card):
        (pci / one.name).symlink_to(one)
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "class/infiniband/mlx5_0/device").symlink_to(card)
    machine = read_machine(tmp_path)
    assert machine.gpus[0].bus == "0000:11:00.0" and machine.cards[0].gbps == 400
    assert machine.card_near == {(0, 0): "PIX"}


def test_this_machine_can_be_read_and_any_can_be_drawn() -> None:
    read_machine()
    assert draw_machine(parse_topo(H100.read_text()), "H100").count("<rect") > 18


def test_rings_of_a_cube_mesh_use_nvlink_only_and_those_of_bridged_pairs_share_the_sockets_link() -> None:
    """DGX-1: each V100 has NVLinks to four of the seven others; NCCL's rings take no PCIe path there."""
    mesh = ("X 1 1 2 2 - - -", "1 X 2 1 - 2 - -", "1 2 X 2 - - 1 -", "2 1 2 X - - - 1",
            "2 - - - X 1 1 2", "- 2 - - 1 X 2 1", "- - 1 - 1 2 X 2", "- - - 1 2 1 2 X")  # fmt: skip
    kinds = {"X": "X", "-": "SYS", "1": "NV1", "2": "NV2"}
    names = " ".join(f"GPU{at}" for at in range(8))
    rows = [f"GPU{at} {' '.join(kinds[one] for one in row.split())}" for at, row in enumerate(mesh)]
    machine = parse_topo("\n".join([names, *rows]))
    found = find_rings(machine)
    hops = {(a, b) for ring in found.orders for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)}
    assert found.total_gbps >= 80 and all(machine.near[hop].startswith("NV") for hop in hops)
    pairs = "GPU0 GPU1 GPU2 GPU3\nGPU0 X NV4 SYS SYS\nGPU1 NV4 X SYS SYS\nGPU2 SYS SYS X NV4\nGPU3 SYS SYS NV4 X\n"
    assert find_rings(parse_topo(pairs)).total_gbps <= 10.0
