"""What an output of perftest says about a link. `diagnose` calls it."""

from cumulo.base.quantities import quantity
from cumulo.plan.diagnose.diagnosis import GDR_STEP, PAIRS_STEP, PORTS_STEP, TOPO_STEP, WIDTH_STEP, Diagnosis
from cumulo.plan.diagnose.perftest_text import Perftest


def perftest_verdict(perftest: Perftest) -> Diagnosis:
    if perftest.port_down:
        return Diagnosis("rail-down", "The port is down.", (), (PORTS_STEP,), "high")
    if perftest.gbps is None:
        if perftest.latency_us is not None and perftest.latency_us <= 6:
            return Diagnosis(
                "healthy", f"A latency of {perftest.latency_us:g} µs is usual.", (), (PAIRS_STEP,), "medium"
            )
        return Diagnosis("unknown", "There is no bandwidth in the text.", (), (PAIRS_STEP,), "low")
    name = perftest.device or "the card"
    evidence = (f"{perftest.gbps:.0f} Gbit/s on {name} at {quantity(perftest.size_bytes, 'B')}",)
    rate = perftest.line_rate
    if perftest.stated is not None and perftest.size_bytes >= 4096 and perftest.gbps < 0.8 * perftest.stated:
        share = f"{perftest.gbps / perftest.stated:.0%} of the port's {perftest.stated:.0f} Gbit/s"
        if perftest.gpu_memory:
            return Diagnosis(
                "no-gdr", f"GPU memory is reached at {share}.", evidence, (GDR_STEP, TOPO_STEP), "medium"
            )
        return Diagnosis(
            "slow-link", f"{name} reaches {share}.", evidence,
            ("run with -q 4, and with the CPU of the card's NUMA node (numactl)", WIDTH_STEP, PORTS_STEP), "high",
        )  # fmt: skip
    if perftest.gpu_memory and (rate is None or rate <= 100):
        return Diagnosis(
            "no-gdr", "GPU memory is reached slowly: GPUDirect RDMA is missing or takes a long way.", evidence,
            (GDR_STEP, TOPO_STEP), "medium",
        )  # fmt: skip
    if rate is not None and rate <= 50:
        return Diagnosis(
            "wrong-nic", f"{name} is a {rate:.0f} Gbit/s port: a management card, not one for GPUs.", evidence,
            (TOPO_STEP, "name a compute card with -d"), "medium",
        )  # fmt: skip
    if rate is not None:
        if perftest.stated is not None:
            return Diagnosis("healthy", f"{name} reaches its {rate:.0f} Gbit/s.", evidence, (), "high")
        return Diagnosis(
            "healthy", f"{name} reaches {rate:.0f} Gbit/s, which is a line rate; a faster port "
            "(see `ibstat`) would be slow.", evidence, (PORTS_STEP,), "medium",
        )  # fmt: skip
    small = perftest.size_bytes < 4096
    if small:
        return Diagnosis(
            "small-messages",
            "At this size the message rate counts.",
            evidence,
            ("run with -s 65536 or -a",),
            "high",
        )
    steps: tuple[str, ...] = (PORTS_STEP, "run with -q 4, and with the CPU of the card's NUMA node (numactl)")
    if perftest.mtu is not None and perftest.mtu < 4096:
        steps = (f"raise the MTU, which is {perftest.mtu}: 4096 needs an interface MTU of 9000", *steps)
    return Diagnosis("slow-link", f"{name} reaches no line rate.", evidence, steps, "medium")
