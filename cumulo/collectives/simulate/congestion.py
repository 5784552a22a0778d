"""Incast on one port, in steps of a few microseconds: the queue, pauses (PFC) and the senders' rates under
DCQCN (Zhu et al. 2015). `cumulo simulate network --collective incast` prints it next to the flow level's time.

Each sender has a rate RC and a target RT. Marked packets bring a notification at most every 50 µs, which halves the
rate by its estimate α; without one it climbs back to RT in five steps and then past it. The port pauses its senders
while its queue is above `pause_bytes`.
"""

from dataclasses import dataclass

import numpy as np

from cumulo.base.quantiles import jain_index
from cumulo.collectives.simulate.fabrics.links import Floats


@dataclass(frozen=True, slots=True)
class CongestionControl:
    """Constants of SimAI's configuration (aliyun/SimAI, inputs/config/SimAI.conf) for 400 Gbit/s."""

    notify_s: float = 50e-6
    climb_s: float = 900e-6
    gain: float = 1 / 256
    add_bytes_per_s: float = 50e6 / 8
    add_more_bytes_per_s: float = 100e6 / 8
    least_bytes_per_s: float = 100e6 / 8
    mark_from_bytes: float = 800e3
    mark_all_bytes: float = 3200e3
    mark_share: float = 0.2
    packet_bytes: int = 9000


@dataclass(frozen=True, slots=True)
class IncastRun:
    end_s: float
    paused_share: float  # of the time in which the senders were paused
    peak_queue_bytes: float
    fairness: float  # Jain's index of the bytes that senders delivered: 1 is even
    use: float  # of the port


def play_incast(
    senders: int,
    size_bytes: float,
    port_bytes_per_s: float,
    control: CongestionControl | None = CongestionControl(),
    pause_bytes: float = 6e6,
    step_s: float = 5e-6,
    seed: int = 0,
) -> IncastRun:
    """All senders start at line rate. `control` None: pauses are all that slows them down."""
    random = np.random.default_rng(seed)
    rate = np.full(senders, port_bytes_per_s)
    target, alpha = rate.copy(), np.ones(senders)
    left, notified = np.full(senders, size_bytes), np.zeros(senders)
    since, climbs = np.zeros(senders), np.zeros(senders, int)
    now = queue = peak = sent_all = 0.0
    pauses: list[bool] = []
    most_steps = int(50 * senders * size_bytes / port_bytes_per_s / step_s) + 1000
    for _ in range(most_steps):
        if not (left > 0).any() and queue <= 0:
            break
        paused = queue > pause_bytes
        pauses.append(paused)
        sending = np.where((left > 0) & (not paused), np.minimum(rate * step_s, left), 0.0)
        left -= sending
        drained = min(queue + float(sending.sum()), port_bytes_per_s * step_s)
        queue += float(sending.sum()) - drained
        sent_all += drained
        now += step_s
        peak = max(peak, queue)
        if control is not None:
            _control(control, queue, sending, rate, target, alpha, notified, since, climbs, step_s, random)
            np.minimum(rate, port_bytes_per_s, out=rate)
    shares: Floats = size_bytes - left
    fair = jain_index(shares.tolist())
    use = sent_all / (port_bytes_per_s * max(now, 1e-12))
    return IncastRun(now, sum(pauses) / max(1, len(pauses)), peak, fair, use)


def _control(
    control: CongestionControl,
    queue: float,
    sending: Floats,
    rate: Floats,
    target: Floats,
    alpha: Floats,
    notified: Floats,
    since: Floats,
    climbs: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    step_s: float,
    random: np.random.Generator,
) -> None:
    """One step of every sender's reaction point."""
    span = control.mark_all_bytes - control.mark_from_bytes
    share = control.mark_share * min(1.0, max(0.0, (queue - control.mark_from_bytes) / span))
    if queue > control.mark_all_bytes:
        share = 1.0
    packets = sending / control.packet_bytes
    marked = random.random(len(rate)) < 1 - (1 - min(share, 1 - 1e-12)) ** packets
    notified += step_s
    since += step_s
    cut = marked & (notified >= control.notify_s)
    target[cut] = rate[cut]
    rate[cut] *= 1 - alpha[cut] / 2
    alpha[cut] = (1 - control.gain) * alpha[cut] + control.gain
    notified[cut], since[cut], climbs[cut] = 0.0, 0.0, 0
    calm = ~cut & (notified >= control.notify_s * 1.1)
    alpha[calm] *= (1 - control.gain) ** (step_s / control.notify_s)
    up = since >= control.climb_s
    target[up & (climbs >= 5)] += control.add_bytes_per_s
    target[up & (climbs >= 10)] += control.add_more_bytes_per_s - control.add_bytes_per_s
    rate[up] = (rate[up] + target[up]) / 2
    climbs[up] += 1
    since[up] = 0.0
    np.maximum(rate, control.least_bytes_per_s, out=rate)
