"""What the load generator itself costs, for `cumulo bench serve --self-test`: it plays against a canned server in
another process, in CPU seconds, so that other programs on the machine do not count.
"""

from collections.abc import Callable

from cumulo.base.report import Row
from cumulo.bench.gateway import canned_server
from cumulo.bench.gateway_upstream import MODEL
from cumulo.load.client import Target
from cumulo.load.connection import Pool
from cumulo.load.player import Level, LoadPlayer
from cumulo.load.prompts import Constant
from cumulo.load.schedule import Workload, plan

_STREAMS, _GAP_S = 40, 0.02
_RATE_TOK_S = _STREAMS / _GAP_S  # 2,000 tokens per second, each in a packet of its own


async def measure(watch: Callable[[Level], bool] | None = None, seconds: float = 3.0) -> list[Row]:
    """`watch` is the live progress, whose cost belongs to the generator's."""
    tokens = max(1, round(seconds / _GAP_S))
    workload = Workload(input_tokens=Constant(32), output_tokens=Constant(tokens))
    with canned_server(tokens, _GAP_S) as url:
        pool = Pool(url)
        try:
            for seed in ("warm-up", "self-test"):  # the first makes the connections
                level = Level(plan(workload, _STREAMS, seed, conversations=_STREAMS))
                await LoadPlayer(pool, Target(MODEL)).play(level, watch)
        finally:
            pool.close()
    received = sum(record.output_tokens for record in level.records)
    tok_per_cpu_s = received / level.cpu_s
    pace = f"{_RATE_TOK_S:,.0f} tokens/s, each in its own packet"
    return [
        Row("share of a core at 2,000 tokens/s", _RATE_TOK_S / tok_per_cpu_s, "", "lower", must=0.5, aim=0.2,
            note=pace),
        Row("tokens per CPU second, paced", tok_per_cpu_s, "tokens", must=2 * _RATE_TOK_S,
            note=f"{received / level.wall_s:,.0f} tokens/s received"),
    ]  # fmt: skip
