"""Seconds of a StepPlan on a device: the cost model behind the simulated player. Made by `replica`.

A step is a roofline by parts, one after the other as the engine runs them:

    layers' products   (memory^p + compute^p)^(1/p): weights hit over bandwidth, 2·tokens·parameters over rate;
                       low-rank adapters that the rows name are weights, too
    attention          KV read by decoding sequences over bandwidth; query-key pairs of prompts over the matrix rate
    between products   bytes of norms, rotation and activation over bandwidth
    draws              the output matrix, and passes over the logits
    fixed              so much per layer and per step
    communication      with tp: two all-reduces a layer; with ep: two all-to-alls a layer with experts; with pp: a
                       hidden state per token between stages
    host               what an engine's host adds for each sequence and for launching a prompt's layers

With pp these are the seconds of all stages together; the loop passes a step from stage to stage.

The host's part is apart: it runs while the device computes the step before (`engine/simulate/engine.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from cumulo.engine.decide.plan import StepPlan, round_rows, round_tokens
from cumulo.engine.simulate.run import DecodeTime, Run, StepTime
from cumulo.errors import ConfigError
from cumulo.plan.network.collectives import Group, collective_s
from cumulo.plan.serve.profile import ServingProfile, profile_for
from cumulo.plan.serve.step_cost_work import Format, StepWork, step_work
from cumulo.spec.device import Device
from cumulo.spec.model import ModelSpec

PARTS = {  # of a step, and what they are called where a person asks what bounds it
    "weights": "reading weights", "products": "matrix arithmetic", "experts": "expert weights and products",
    "attention": "reading keys and values", "prompts": "attention of prompts",
    "elementwise": "memory traffic between products", "draws": "the output matrix and draws",
    "fixed": "launches and latencies", "communication": "communication", "swap": "moving KV blocks",
}  # fmt: skip
_ADAPTER_SPEED = 0.45  # share of the bandwidth; measured on an H200, 0.42 to 0.52 (docs/adapters.md)


class StepLoad(NamedTuple):
    """A StepPlan in numbers."""

    tokens: int
    rows: int
    draws: int
    decode_context: int = 0  # tokens that decoding sequences attend to, over all of them
    shared_context: int = 0  # of these, such as an earlier sequence of the step reads, too
    chunk_pairs: int = 0  # query-key pairs of prompt chunks
    chunk_context: int = 0  # tokens their chunks attend to
    swapped_blocks: int = 0


def load_of(plan: StepPlan, window: int | None = None, shared: Mapping[int, int] | None = None) -> StepLoad:
    """`shared`: by slot, tokens of its context that others read as well."""
    rows, starts = len(plan.slots), plan.starts
    if window is not None:
        starts = [min(start, window - 1) for start in starts]
    decode_context, chunk_pairs, chunk_context = sum(starts) + rows, 0, 0
    for start, count in [row for row in zip(plan.starts, plan.counts, strict=True) if row[1] != 1]:
        decode_context -= 1 + (start if window is None else min(start, window - 1))
        chunk_pairs += pairs(start, count, window)
        chunk_context += count + (start if window is None else min(start, window))
    return StepLoad(
        sum(plan.counts),
        rows,
        len(plan.draw_rows) + drafts_of(plan),
        decode_context,
        sum([shared.get(slot, 0) for slot in plan.slots]) if shared else 0,
        chunk_pairs,
        chunk_context,
        len(plan.swap_in) + len(plan.swap_out),
    )


def drafts_of(plan: StepPlan) -> int:
    """Drafted tokens, at each of which there is a draw."""
    if plan.rounds is not None:
        return len(plan.slots) * plan.rounds.drafts
    return sum(len(draft.tokens) for draft in plan.drafts)


def pairs(start: int, count: int, window: int | None = None) -> int:
    """Keys that tokens [start, start + count) see, each itself and all before it within the window."""
    if window is None or start + count <= window:
        return count * start + count * (count + 1) // 2
    growing = max(0, min(count, window - start))
    return pairs(start, growing) + (count - growing) * window


class StepCostModel:
    """A StepClock (engine/simulate/run.py) of one rank under a profile. Ranks of a replica run in step."""

    def __init__(
        self,
        work: StepWork,
        device: Device,
        profile: ServingProfile,
        *,
        weights: str,
        compute: str,
        experts_in: str = "bfloat16",
        tensor: Group | None = None,
        expert: Group | None = None,
        stages: Group | None = None,
        spread: int = 1,
        expert_nodes: int = 1,
        block_size: int = 64,
        slower: float = 1.0,
        adapters: int = 0,
        adapter_bytes: float = 0.0,
    ) -> None:
        """`spread`: engines that have attention of their own and share the experts, and `expert_nodes` the groups
        of scale-up links that they lie in; all are as busy as this one, and over several nodes a step is computed
        as two micro-batches, one of which computes while the other is sent (DeepSeek-AI 2024b, section 3.4).
        `slower`: every step takes so many times as long, to see what the profile's own error would change.
        `adapters`: low-rank ones that requests name equally often; a step reads those of its rows."""
        if weights not in profile.products:
            known = ", ".join(profile.products)
            raise ConfigError(f"{device.name} has no measured products of {weights} weights; it has: {known}")
        self.work, self.profile, self._tensor, self._expert = work, profile, tensor, expert
        self._stages, self._spread, self._expert_nodes = stages, spread, expert_nodes
        self._sends_8bit = compute in ("float8", "float4")
        others = (1 if tensor is None else tensor.ranks) * (1 if stages is None else stages.ranks) - 1
        self._submit_s = profile.host.submit_s + others * profile.host.submit_rank_s
        bandwidth, reached, experts = device.memory_bytes_per_s, profile.products[weights], profile.experts
        rate = device.flops(compute)
        self._power, self._slower = reached.overlap, slower
        self._weights_s = work.dense_parameters * work.weight_bytes / (bandwidth * reached.bandwidth)
        self._token_s = 2 * work.dense_parameters / (rate * reached.matmul)
        self._adapters, self._adapter_s = adapters, adapter_bytes / (bandwidth * _ADAPTER_SPEED)
        self._expert_power = experts.overlap
        self._expert_s = work.expert_parameters * work.expert_bytes / (bandwidth * experts.bandwidth)
        plain = profile.products.get("bfloat16", reached)
        # Attention and head stay in 16 bits, and experts whose format the device does not compute in.
        wide = device.flops("bfloat16") if self._sends_8bit else rate
        if experts_in in device.peak_flops and experts_in in profile.products:
            expert_rate = device.flops(experts_in) * profile.products[experts_in].matmul
        else:
            expert_rate = wide * plain.matmul
        self._expert_token_s = (
            2
            * work.expert_parameters
            * work.experts_per_token
            * work.expert_share
            / (expert_rate * experts.matmul)
        )
        self._head_s = work.head_parameters * work.head_bytes / (bandwidth * plain.bandwidth)
        self._draw_s = 2 * work.head_parameters / (wide * plain.matmul)
        self._logits_s = profile.draw_passes * work.logit_bytes / bandwidth
        self._kv_s = _together(
            work.kv_bytes_per_token / (bandwidth * profile.kv_bandwidth),
            work.decode_flops_per_pair / (wide * profile.attention),
            self._power,
        )
        self._shared_saving = 1 - 1 / profile.shared_kv_speedup
        self._pair_s = work.attention_flops_per_pair / (wide * profile.attention)
        self._elementwise_s = work.elementwise_bytes_per_token / (bandwidth * profile.elementwise)
        self._fixed_s = (
            profile.step_s * (1 if stages is None else stages.ranks)
            + work.layers * profile.layer_s
            + work.moe_layers * profile.expert_layer_s
        )
        self._batch_s = work.layers * profile.batch_layer_s
        self._block_s = block_size * work.kv_bytes_per_token / device.host_bytes_per_s
        self._decodes: dict[int, DecodeTime] = {}
        self._products: dict[tuple[int, int], tuple[float, float, float, float]] = {}
        self._spent = [0.0] * len(PARTS)  # by all steps asked about

    # -- StepClock -------------------------------------------------------------------------------------------
    def time_of(self, plan: StepPlan, shared: Mapping[int, int] | None = None) -> StepTime:
        load = load_of(plan, self.work.window, shared)
        host, parts = self.profile.host, self.parts(load)
        self._spent = [total + part for total, part in zip(self._spent, parts, strict=True)]
        if load.tokens == load.rows == load.draws and not load.swapped_blocks:
            decode = self.decode(load.rows)
            if decode is not None:
                return decode.time_with(load.decode_context, load.shared_context)
        prompts_s = host.prompt_submit_s if load.tokens > load.rows + drafts_of(plan) else 0.0
        return StepTime(
            self._submit_s + load.rows * host.submit_row_s + prompts_s,
            self._slower * sum(parts),
            host.apply_s + load.draws * host.apply_row_s,
        )

    def decode(self, rows: int) -> DecodeTime | None:
        if self.work.window is not None or self.work.part_window is not None or self._expert_nodes > 1:
            return None  # seconds do not grow evenly with the contexts
        time = self._decodes.get(rows)
        if time is None:
            host = self.profile.host
            time = self._decodes[rows] = DecodeTime(
                self._submit_s + rows * host.submit_row_s,
                self._slower * sum(self.parts(StepLoad(rows, rows, rows))),
                self._slower * self._kv_s,
                self._shared_saving,
                host.apply_s + rows * host.apply_row_s,
            )
        return time

    def arrival_s(self, prompt_tokens: int) -> float:
        return self.profile.host.arrival_s + prompt_tokens * self.profile.host.arrival_token_s

    # -- where the time goes --------------------------------------------------------------------------------
    def spent(self, run: Run) -> dict[str, float]:
        """Device seconds of a run by PARTS: of the steps asked about one by one, and of its stretches."""
        total = list(self._spent)
        for rows, steps in run.stretch_steps.items():
            for index, part in enumerate(self.parts(StepLoad(rows, rows, rows))):
                total[index] += steps * part
        total[list(PARTS).index("attention")] += run.stretch_read * self._kv_s
        return dict(zip(PARTS, total, strict=True))

    def parts(self, load: StepLoad) -> tuple[float, ...]:
        """Seconds by PARTS; products are named after what bounds them: weights streaming or arithmetic."""
        if self._expert_nodes == 1:
            return self._parts(load)
        half = StepLoad(*(-(-amount // 2) for amount in load))
        *computed, communication_s, swap_s = (2 * part for part in self._parts(half))
        return (*computed, max(0.0, communication_s - sum(computed)), swap_s)

    def _parts(self, load: StepLoad) -> tuple[float, ...]:
        tokens, draws = load.tokens, load.draws
        if self.profile.rounds_up:
            tokens = round_rows(tokens) if tokens == load.rows else round_tokens(tokens)
            draws = round_rows(draws) if draws else 0
        found = self._products.get((tokens, draws))
        if found is None:
            found = self._products[tokens, draws] = self._products_s(tokens, draws)
        dense_s, expert_s, draw_s, communication_s = found
        streaming = self._weights_s > tokens * self._token_s
        read = self._seen(load.decode_context - load.shared_context * self._shared_saving, load.rows)
        pairs_seen = self._seen(load.chunk_pairs, load.tokens)
        return (
            dense_s if streaming else 0.0,
            0.0 if streaming else dense_s,
            expert_s,
            read * self._kv_s,
            pairs_seen * self._pair_s + load.chunk_context * self._kv_s,
            tokens * self._elementwise_s,
            draw_s,
            self._fixed_s + self._batch_s * (1 - 1 / load.rows) + self._host_s(load),
            communication_s,
            load.swapped_blocks * self._block_s,
        )

    def _seen(self, keys: float, queries: int) -> float:
        """Of so many keys, where some layers look back only so far."""
        work = self.work
        if work.part_window is None:
            return keys
        return (1 - work.windowed) * keys + work.windowed * min(keys, queries * work.part_window)

    def _host_s(self, load: StepLoad) -> float:
        launches = self.work.layers * self.profile.prompt_layer_s if load.chunk_pairs else 0.0
        return load.rows * self.profile.row_s + launches

    def _products_s(self, tokens: int, draws: int) -> tuple[float, float, float, float]:
        """Of the layers, the experts, the draws and between ranks; padded, few sizes come up again and again."""
        weights_s = self._weights_s
        if self._adapters:
            weights_s += self._adapter_s * self._adapters * (1 - (1 - 1 / self._adapters) ** tokens)
        dense_s = _together(weights_s, tokens * self._token_s, self._power)
        expert_s = draw_s = 0.0
        if self.work.experts:
            met = tokens * self._spread
            hit_s = self.work.experts_hit(met) * self._expert_s
            expert_s = _together(hit_s, met * self._expert_token_s, self._expert_power)
        if draws:
            draw_s = _together(self._head_s, draws * self._draw_s, self._power) + draws * self._logits_s
        return dense_s, expert_s, draw_s, self._communication_s(tokens, draws)

    def _communication_s(self, tokens: int, draws: int) -> float:
        work, seconds = self.work, 0.0
        message = tokens * work.message_bytes
        if self._tensor is not None:
            # After attention and after the feed-forward (Shoeybi et al. 2019, section 3); experts bring their own.
            reductions = 2 * work.layers - (work.moe_layers if self._expert is not None else 0)
            ranks = self._tensor.ranks
            once = ranks / (2 * (ranks - 1)) if self.profile.adds_in_switch else 1.0
            # A switch that adds saves bytes, and no latency: that bounds small models on many ranks.
            least_s = collective_s("all_reduce", 0.0, self._tensor)
            seconds += reductions * max(least_s, once * collective_s("all_reduce", message, self._tensor))
        if self._expert is not None and self._spread == 1:
            sent = (
                message * work.experts_per_token / self._expert.ranks
            )  # each rank has a share of the tokens
            seconds += 2 * work.moe_layers * collective_s("all_to_all", sent, self._expert)
        elif self._expert is not None:
            # A decoding token goes to each of its experts, a prompt's once to each node (DeepEP's two kernels).
            copies = min(work.experts_per_token, self._expert.ranks)
            once = min(copies, self._expert_nodes, work.expert_groups) if self._expert_nodes > 1 else copies
            sent = work.message_bytes * (draws * copies + (tokens - draws) * once)
            both_ways = 1.5 if self._sends_8bit else 2.0
            seconds += both_ways * work.moe_layers * collective_s("all_to_all", sent, self._expert)
        if self._stages is not None:
            seconds += (self._stages.ranks - 1) * collective_s("send_recv", message, self._stages)
        return seconds * self.profile.collectives


def alone_tok_s(
    spec: ModelSpec, device: Device, weights: str, bytes_per_weight: float
) -> tuple[float, float]:
    """Tokens per second of one request that has the device to itself: of a prompt of 512 tokens, and of its answer.
    `weights`: the format whose products were measured, `bytes_per_weight` what they take."""
    on_cpu = device.generation == "cpu"
    plain = "float32" if on_cpu else "bfloat16"
    work = replace(
        step_work(spec, Format(plain, plain, plain, plain, plain, plain)),
        weight_bytes=bytes_per_weight, expert_bytes=bytes_per_weight, head_bytes=bytes_per_weight,
    )  # fmt: skip
    cost = StepCostModel(work, device, profile_for(device), weights=weights, compute=plain)
    tokens = min(512, spec.max_context)
    prompt = StepLoad(tokens, 1, 1, chunk_pairs=pairs(0, tokens), chunk_context=tokens)
    answer = StepLoad(1, 1, 1, decode_context=tokens)
    host_s = cost.profile.host.submit_s + cost.profile.host.apply_s
    return tokens / (sum(cost.parts(prompt)) + host_s), 1 / (sum(cost.parts(answer)) + host_s)


def _together(memory_s: float, compute_s: float, power: float) -> float:
    """Two things that a device does at the same time, not perfectly."""
    if memory_s == 0 or compute_s == 0:
        return memory_s + compute_s
    longer, shorter = (memory_s, compute_s) if memory_s > compute_s else (compute_s, memory_s)
    return float(longer * (1 + (shorter / longer) ** power) ** (1 / power))
