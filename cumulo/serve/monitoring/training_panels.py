"""The panels of training runs, as plain data. dashboard.py makes training.json of it."""

from cumulo.serve.monitoring.panel import WINDOW, Panel, Query, Section

_RUN = 'run=~"$run"'


def _gauge(name: str) -> Query:
    return Query(f"cumulo:train_{name}{{{_RUN}}}", "{{run}}")


def _rate(name: str) -> str:
    return f"sum by (run, collective, ranks) (rate(cumulo:train_collective_{name}{{{_RUN}}}[{WINDOW}]))"


_NAMED = "{{run}} {{collective}}, {{ranks}} ranks"

TRAINING = Section(
    "Training",
    (
        Panel("Loss", "Of the last step, in nats per token.", (_gauge("loss"),)),
        Panel("Step time", "Of the last step.", (_gauge("step_seconds"),), unit="s"),
        Panel("Throughput", "Tokens that a step computes in a second.", (_gauge("tokens_per_second"),)),
        Panel("MFU", "Model FLOPs utilisation.", (_gauge("mfu"),), unit="percentunit", maximum=1),
        Panel("Gradient norm", "Before clipping.", (_gauge("gradient_norm"),)),
        Panel("Memory", "Most that the first rank has held.", (_gauge("memory_bytes"),), unit="bytes"),
        Panel(
            "Bus bandwidth",
            "Of each collective, as nccl-tests counts it: bytes over the busiest link in a second.",
            (Query(f"{_rate('bus_bytes_total')} / {_rate('seconds_total')}", _NAMED),),
            unit="Bps",
        ),
        Panel(
            "Measured over predicted",
            "Time of collectives over what the cost model says; waiting for other ranks counts.",
            (Query(f"{_rate('seconds_total')} / {_rate('predicted_seconds_total')}", _NAMED),),
        ),
        Panel(
            "Time in collectives",
            "Share of the time; what runs while the rank computes counts too.",
            (Query(_rate("seconds_total"), _NAMED),),
            unit="percentunit",
            stacked=True,
        ),
    ),
)
