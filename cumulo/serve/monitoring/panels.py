"""Panels: what an operator looks at, as plain data. dashboard.py makes Grafana's JSON of it.

Expressions are PromQL; `$model` and `$instance` are chosen at the top of the dashboard.
"""

from dataclasses import dataclass

CHOSEN = 'model_name=~"$model",instance=~"$instance"'
_WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"  # Grafana's name of it
    stacked: bool = False
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Number:
    """One large figure with its colours: (from this value on, colour), the first value being the lowest."""

    title: str
    description: str
    query: Query
    colours: tuple[tuple[float | None, str], ...]
    unit: str = "short"
    words: tuple[tuple[str, str], ...] = ()  # shown in place of these values


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    panels: tuple[Panel | Number, ...]


def gauge(name: str) -> str:
    return f"cumulo:{name}{{{CHOSEN}}}"


def rate(name: str, by: str = "", window: str = _WINDOW) -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate(cumulo:{name}{{{CHOSEN}}}[{window}]))"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', by='le')})"


def percentiles(title: str, histogram: str, description: str) -> Panel:
    queries = tuple(Query(quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))
    return Panel(title, description, queries, unit="s")


def _share_of_answers(status: str) -> str:
    """The share of the API's answers whose status matches; 0, not nothing, where there is no such answer."""
    matching = f'rate(cumulo:http_responses_total{{{CHOSEN},status=~"{status}"}}[{_WINDOW}])'
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

FLEET = Section(
    "Replicas",
    (
        Panel(
            "Replicas that take requests",
            "Of servers with --replicas: replicas that are ready, and those that drain.",
            (
                Query(f"sum by (instance) ({gauge('replica_up')})", "ready {{instance}}"),
                Query(f"sum by (instance) ({gauge('replica_draining')})", "draining {{instance}}"),
            ),
        ),
        Panel(
            "Running and waiting, by replica",
            "Sequences that each replica computes, and those that wait there.",
            (
                Query(f"sum by (instance, replica) ({gauge('replica_running')})", "{{replica}} running"),
                Query(f"sum by (instance, replica) ({gauge('replica_waiting')})", "{{replica}} waiting"),
            ),
        ),
        Panel(
            "Prompt tokens to compute, by replica",
            "Accepted and not computed yet: what a new request waits for.",
            (Query(f"sum by (instance, replica) ({gauge('replica_waiting_tokens')})", "{{replica}}"),),
        ),
        Panel(
            "Requests, by replica",
            "How many requests the router gives to each replica, per second.",
            (Query(rate("replica_requests_total", by="instance, replica"), "{{replica}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Found in the cache, by replica",
            "Share of prompt tokens that the router found in the prefix cache of the replica it chose.",
            (
                Query(
                    f"{rate('replica_cached_tokens_total', by='instance, replica')} / "
                    f"{rate('replica_prompt_tokens_total', by='instance, replica')}",
                    "{{replica}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "KV cache, by replica",
            "Share of KV blocks in use.",
            (Query(f"max by (instance, replica) ({gauge('replica_kv_usage')})", "{{replica}}"),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Blocks in the prefix cache, by replica",
            "KV blocks that hold a prefix the next request may share.",
            (Query(f"sum by (instance, replica) ({gauge('replica_cached_blocks')})", "{{replica}}"),),
        ),
        Panel(
            "Failures and moved requests",
            "Replicas replaced after a failure, and requests that another replica took over in mid-answer.",
            (
                Query(f"sum by (instance, replica) ({gauge('replica_restarts')})", "{{replica}} restarts"),
                Query(rate("requests_moved_total"), "moved per second"),
            ),
        ),
        Panel(
            "Expected over measured TTFT",
            "How well the router predicts the time to first token: 1 is exact.",
            tuple(
                Query(quantile(share, "route_ttft_predicted_over_measured"), f"p{share * 100:g}")
                for share in (0.1, 0.5, 0.9)
            ),
        ),
    ),
)

_EXPERT_TOKENS = rate("rank_expert_tokens_total", by="instance, replica, rank")
RANKS = Section(
    "Ranks",
    (
        Panel(
            "Step time, by rank",
            "Of engines over several processes (--tp, --pp, --dp, --ep): mean time of a step, waiting included.",
            (
                Query(
                    f"{rate('rank_step_seconds_total', by='instance, replica, rank')} / "
                    f"{rate('rank_steps_total', by='instance, replica, rank')}",
                    "{{replica}} rank {{rank}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Waiting for other ranks",
            "Share of its time in steps that a rank waited for others. The one that waits least is the slowest.",
            (
                Query(
                    f"{rate('rank_wait_seconds_total', by='instance, replica, rank')} / "
                    f"{rate('rank_step_seconds_total', by='instance, replica, rank')}",
                    "{{replica}} rank {{rank}}",
                ),
            ),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Tokens for experts, by rank",
            "With --ep: choices of tokens that fall on the experts of each rank, over the mean of all ranks.",
            (
                Query(
                    f"{_EXPERT_TOKENS} / on (instance, replica) group_left avg by (instance, replica) "
                    f"({_EXPERT_TOKENS})",
                    "{{replica}} rank {{rank}}",
                ),
            ),
        ),
        Panel(
            "Memory, by rank",
            "Memory of each rank's process, or what it holds on its GPU.",
            (
                Query(
                    f"sum by (instance, replica, rank) ({gauge('rank_memory_bytes')})",
                    "{{replica}} rank {{rank}}",
                ),
            ),
            unit="bytes",
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
