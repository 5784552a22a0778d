"""`cumulo topology`: cumulo/collectives/topology."""

from pathlib import Path

import pytest
import yaml

from cumulo.collectives.topology.readers import parse_nccl_xml, parse_topo, read_machine
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


def test_this_machine_can_be_read() -> None:
    read_machine()
