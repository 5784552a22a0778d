"""Panels: what an operator looks at, as plain data. dashboard.py makes Grafana's JSON of it.

Expressions are PromQL; `$model` and `$instance` are chosen at the top of the dashboard.
"""

from cumulo.serve.monitoring.fleet_panels import FLEET, RANKS
from cumulo.serve.monitoring.panel import (
    CHOSEN,
    WINDOW,
    Number,
    Panel,
    Query,
    Section,
    gauge,
    percentiles,
    quantile,
    rate,
)


def _share_of_answers(status: str) -> str:
    """The share of the API's answers whose status matches; 0, not nothing, where there is no such answer."""
    matching = f'rate(cumulo:http_responses_total{{{CHOSEN},status=~"{status}"}}[{WINDOW}])'
    return f"(sum ({matching}) or vector(0)) / {rate('http_responses_total')}"


HEALTH = Section(
    "Health",
    (
        Number(
            "Engine",
            "Whether every chosen engine process is ready.",
            Query(f"min({gauge('engine_up')})", ""),
            ((None, "red"), (1, "green")),
            words=(("0", "down"), ("1", "up")),
        ),
        Number(
            "Restarts",
            "Engine processes replaced since the servers started.",
            Query(f"sum({gauge('engine_restarts')})", ""),
            ((None, "green"), (1, "orange"), (3, "red")),
        ),
        Number(
            "Running",
            "Sequences that compute.",
            Query(f"sum({gauge('num_requests_running')})", ""),
            ((None, "blue"),),
        ),
        Number(
            "Waiting",
            "Sequences that wait for room.",
            Query(f"sum({gauge('num_requests_waiting')})", ""),
            ((None, "green"), (1, "yellow"), (100, "red")),
        ),
        Number(
            "KV cache",
            "Share of KV blocks in use, of the fullest engine.",
            Query(f"max({gauge('kv_cache_usage_perc')})", ""),
            ((None, "green"), (0.85, "yellow"), (0.95, "red")),
            unit="percentunit",
        ),
        Number(
            "Generated",
            "Output tokens per second.",
            Query(rate("generation_tokens_total"), ""),
            ((None, "blue"),),
            unit="suffix:tok/s",
        ),
    ),
)

TRAFFIC = Section(
    "Traffic",
    (
        Panel(
            "Requests running and waiting",
            "Sequences that compute, and those that wait for a slot or for KV blocks.",
            (
                Query(f"sum({gauge('num_requests_running')})", "running"),
                Query(f"sum({gauge('num_requests_waiting')})", "waiting"),
            ),
        ),
        Panel(
            "Throughput",
            "Tokens per second: prompts of requests that ended, and answers as they are generated.",
            (
                Query(rate("prompt_tokens_total"), "prompt"),
                Query(rate("generation_tokens_total"), "generated"),
            ),
            unit="suffix:tok/s",
        ),
        Panel(
            "Requests ended, by how",
            "stop and length are answers; abort: the client left; error: it was told so.",
            (Query(rate("request_success_total", by="finished_reason"), "{{finished_reason}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Calls by adapter",
            "Calls per second that were answered with a low-rank adapter, and how many adapters are loaded.",
            (
                Query(rate("lora_requests_total", by="adapter"), "{{adapter}}"),
                Query(f"sum({gauge('lora_adapters')})", "adapters loaded"),
            ),
        ),
        Panel(
            "Answers by status",
            "What the API sent, probes and metrics left out. 429: a queue or a rate limit was full.",
            (Query(rate("http_responses_total", by="status"), "{{status}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Refused and failed",
            "Share of answers that were 429 or 5xx.",
            (Query(_share_of_answers("429"), "429"), Query(_share_of_answers("5.."), "5xx")),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Lengths",
            "Tokens of prompts and of answers, half and all but one in a hundred of them.",
            tuple(
                Query(quantile(share, f"request_{part}_tokens"), f"{part} p{share * 100:g}")
                for part in ("prompt", "generation")
                for share in (0.5, 0.99)
            ),
        ),
    ),
)

LATENCY = Section(
    "Latency and steps",
    (
        percentiles(
            "Time to first token",
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
        ),
        percentiles(
            "Inter-token latency", "inter_token_latency_seconds", "Between two streamed tokens of one answer."
        ),
        percentiles(
            "End to end", "e2e_request_latency_seconds", "From a request's arrival to the end of its answer."
        ),
        percentiles(
            "Queue wait",
            "request_queue_time_seconds",
            "From reaching the engine to being admitted to a step.",
        ),
        percentiles("Step", "step_duration_seconds", "What the runner took for one step of the engine."),
        Panel(
            "Tokens per step",
            "How full the engine's steps are, on average.",
            (
                Query(
                    f"{rate('iteration_tokens_total_sum')} / {rate('iteration_tokens_total_count')}",
                    "tokens",
                ),
            ),
        ),
    ),
)

MEMORY = Section(
    "Memory and the prefix cache",
    (
        Panel(
            "KV cache in use",
            "Share of KV blocks that running sequences hold.",
            (Query(f"max by (instance) ({gauge('kv_cache_usage_perc')})", "{{instance}}"),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens that were found in the cache and not computed.",
            (
                Query(
                    f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}",
                    "hit rate",
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Preemptions, by reason",
            "Sequences that had to give way, per second.",
            (Query(rate("preemptions_by_reason_total", by="reason"), "{{reason}}"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            "Recomputed tokens",
            "Tokens computed again after preemptions, and for comparison all tokens generated.",
            (
                Query(rate("recomputed_tokens_total"), "recomputed"),
                Query(rate("generation_tokens_total"), "generated"),
            ),
            unit="suffix:tok/s",
        ),
        Panel(
            "Blocks in the prefix cache",
            "KV blocks, in use or free, that hold a prefix the next request may share.",
            (Query(f"sum by (instance) ({gauge('prefix_cache_blocks')})", "{{instance}}"),),
        ),
        Panel(
            "Memory ledger: predicted over measured",
            "1: the plan was right. Below 1 more memory is used than was planned for.",
            (
                Query(
                    f"max by (instance, component) ({gauge('ledger_predicted_over_measured')})",
                    "{{component}} {{instance}}",
                ),
            ),
        ),
    ),
)

SHARING = Section(
    "Sharing",
    (
        Panel(
            "Fairness",
            "Jain's index over the tokens served to tenants that had work: 1 is an equal share for each.",
            (Query(f"min({gauge('fairness_index')})", "fairness index"),),
            maximum=1,
        ),
        Panel(
            "Tokens served, by API key",
            "Prompt tokens computed and output tokens drawn for each key.",
            (Query(rate("tenant_tokens_total", by="tenant"), "{{tenant}}"),),
            unit="suffix:tok/s",
            stacked=True,
        ),
        Panel(
            "Waiting, by reason",
            "Seconds waited per second, that is how many requests wait on average: behind others, for a slot, "
            "for KV blocks, or preempted. Counted when a request ends.",
            (Query(rate("wait_seconds_total", by="reason"), "{{reason}}"),),
            stacked=True,
        ),
    ),
)


SECTIONS = (HEALTH, TRAFFIC, LATENCY, SHARING, MEMORY, FLEET, RANKS)


def expressions() -> list[str]:
    """Every query of the dashboard."""
    found: list[str] = []
    for section in SECTIONS:
        for panel in section.panels:
            queries = panel.queries if isinstance(panel, Panel) else (panel.query,)
            found += [query.expression for query in queries]
    return found
