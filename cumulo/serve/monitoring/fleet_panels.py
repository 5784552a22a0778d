"""Panels of replicas behind one server, and of the ranks of an engine. Part of panels.py."""

from cumulo.serve.monitoring.panel import Panel, Query, Section, gauge, quantile, rate

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
