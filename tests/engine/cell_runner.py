"""CellRunner: a player of StepPlans for tests of the scheduler. No model, but real memory.

Every KV cell remembers which token at which position was written to it. A drawn token is a hash of the whole
context *as read back through the block table*, so a block that was overwritten, lost, not copied or not
swapped back changes the output, as it would with a model, and is reported at once.
"""

from dataclasses import dataclass
from hashlib import blake2b

from cumulo.engine.decide.plan import StepPlan, StepResult, TokenLogprobs


def next_token(context: list[int], seed: int, sample_index: int, vocab: int) -> int:
    data = ",".join(map(str, context)) + f"|{seed}|{sample_index}"
    return int.from_bytes(blake2b(data.encode(), digest_size=8).digest(), "little") % vocab


def candidates(context: list[int], vocab: int, count: int) -> list[tuple[int, float]]:
    """Pretend log-probabilities for beam search: distinct tokens, falling scores that depend on the context."""
    first = next_token(context, 0, 0, vocab)
    return [((first + i * 7) % vocab, -0.1 - 0.37 * i - (first % 13) / 17) for i in range(min(count, vocab))]


@dataclass
class _Slot:
    tokens: list[int]
    table: list[int]
    seed: int
    sample_index: int
    beam_width: int | None
    prompt_length: int
    want_logprobs: bool


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class CellRunner:
    def __init__(self, blocks: int, block_size: int, host_blocks: int, vocab: int) -> None:
        self.block_size, self.vocab = block_size, vocab
        empty = (-1, -1)
        self.device = [[empty] * block_size for _ in range(blocks)]
        self.host = [[empty] * block_size for _ in range(host_blocks)]
        self.slots: dict[int, _Slot] = {}
        self.steps = 0
        self.computed_tokens = 0

    def submit(self, plan: StepPlan) -> _Done:
        self.steps += 1
        for device, host in plan.swap_out:
            self.host[host] = self.device[device][:]
        for host, device in plan.swap_in:
            self.device[device] = self.host[host][:]
        for new in plan.begin:
            self.slots[new.slot] = _Slot(
                list(new.tokens), list(new.blocks), new.seed, new.sample_index, new.params.beam_width,
                new.prompt_length, new.params.prompt_logprobs is not None,
            )  # fmt: skip
        for slot, block in plan.extend:
            self.slots[slot].table.append(block)
        for slot, index, block in plan.replace:
            self.slots[slot].table[index] = block
        for source, target in plan.copies:
            self.device[target] = self.device[source][:]
        size = self.block_size
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            state = self.slots[slot]
            for position in range(start, start + count):
                self.device[state.table[position // size]][position % size] = (
                    position,
                    state.tokens[position],
                )
            self.computed_tokens += count
        result = StepResult(tokens=[])
        for draw, (row, slot) in enumerate(zip(plan.draw_rows, plan.draw_slots, strict=True)):
            state = self.slots[slot]
            end = plan.starts[row] + plan.counts[row]
            context = self._read(state, end)
            assert context == state.tokens[:end], f"slot {slot} reads {context}, wrote {state.tokens[:end]}"
            token = next_token(context, state.seed, state.sample_index, self.vocab)
            if state.beam_width:
                top = candidates(context, self.vocab, 2 * state.beam_width)
                result.logprobs[draw] = TokenLogprobs(top[0][0], top[0][1], 1, top)
                token = top[0][0]
            del state.tokens[end:]
            state.tokens.append(token)
            result.tokens.append(token)
        for row in plan.prompt_logprob_rows:
            state, start = self.slots[plan.slots[row]], plan.starts[row]
            last = min(start + plan.counts[row], state.prompt_length - 1)
            result.prompt_logprobs[row] = [
                TokenLogprobs(state.tokens[p], -float(p), 1, []) for p in range(start + 1, last + 1)
            ]
        return _Done(result)

    def _read(self, state: _Slot, end: int) -> list[int]:
        context = []
        for position in range(end):
            at, token = self.device[state.table[position // self.block_size]][position % self.block_size]
            assert at == position, f"position {position} finds the cell of position {at}"
            context.append(token)
        return context

    def close(self) -> None:
        pass
