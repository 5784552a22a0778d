"""What `cumulo simulate network --algorithm switchml` prints: an all-reduce through a switch that adds."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cumulo.cli.network.options import NetworkOptions

# Packets of all workers that are played; longer collectives go on at the same pace. With losses the unluckiest slot
# decides, which a short part does not show.
_MOST_PACKETS, _MOST_WITH_LOSSES = 60_000, 300_000
_LEAST_ROUNDS = 8  # of the pool, so that its start counts little


def print_switch(chosen: "NetworkOptions") -> None:
    from cumulo.base import report
    from cumulo.base.quantities import parse_bytes, parse_duration_s
    from cumulo.base.report import Row
    from cumulo.cli.shared.terminal import out, working
    from cumulo.collectives.simulate.switch_packets import PACKET_BYTES, SwitchLinks, play_switch
    from cumulo.errors import ConfigError
    from cumulo.spec.catalog import shipped

    cluster = chosen.cluster.cluster(shipped(chosen.catalog_file))
    if chosen.collective != "all_reduce" or cluster.gpus > cluster.fabric.switch_ports:
        raise ConfigError(
            f"switchml is an all-reduce of the workers of one switch: take --collective all_reduce and at most "
            f"{cluster.fabric.switch_ports} --gpus, the ports of a switch of {cluster.fabric.name}"
        )
    links = SwitchLinks(
        cluster.gpus,
        cluster.node.nic_bytes_per_s,
        cluster.fabric.latency_s / 2,
        chosen.loss,
        parse_duration_s(chosen.resend, "--resend"),
        chosen.seed,
    )
    size = parse_bytes(chosen.size)
    slots = chosen.slots or links.slots_for_line_rate
    packets = max(1, -(-int(size) // PACKET_BYTES))
    most = _MOST_WITH_LOSSES if chosen.loss else _MOST_PACKETS
    played = min(packets, max(_LEAST_ROUNDS * slots, most // cluster.gpus))
    with working("simulating"):
        run = play_switch(links, played, slots)
    seconds = run.seconds * packets / played
    note = "" if played == packets else f"from its first {played:,} of {packets:,} packets"
    rate = size / seconds
    ring_s = 2 * (cluster.gpus - 1) / cluster.gpus * size / links.bytes_per_s
    rows = [
        Row("right on every worker", run.right, must=True),
        Row("time", seconds * 1e3, "ms", "lower", note=note),
        Row("a ring over the same links", ring_s * 1e3, "ms", "lower", note="its bytes alone"),
        Row("added up", rate / 1e9, "GB/s", note=f"{rate / links.bytes_per_s:.0%} of a worker's link"),
        Row("slots of the pool", slots, note=f"{links.slots_for_line_rate} keep the link busy"),
        Row("memory of the pool", 2 * slots * PACKET_BYTES / 1024, "KiB", "lower", note="two copies of each slot"),
        Row("packets lost", 100 * run.lost / max(1, run.sent * 2), "%", "lower"),
        Row("packets sent again", 100 * run.again / max(1, run.sent), "%", "lower"),
    ]  # fmt: skip
    report.write_json(chosen.json_file, rows)
    if str(chosen.json_file) != "-":
        out.print(report.table(f"SwitchML, {cluster.gpus} workers of one switch", rows))
