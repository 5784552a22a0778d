"""Shorter jobs count more: by the time they are predicted to take, or by the GPU time that they have had."""

from dataclasses import dataclass

import numpy as np

from cumulo.cluster.decide.elastic_jobs.columns import ActiveJobs
from cumulo.cluster.decide.elastic_jobs.prices import Floats
from cumulo.cluster.decide.nodes import Ints

_SHORT_S = 60.0  # jobs that are shorter count alike
# GPU time from which on a job counts less. If it counted a little less at every decision, jobs that wait would take
# turns with those that run (Tiresias has queues for this: Gu et al., 2019).
_QUEUES_S: Floats = np.array([_SHORT_S * 4.0**queue for queue in range(21)])


@dataclass(frozen=True, slots=True)
class ShortFirst:
    """`power`: by which shorter jobs count more; 0: all count alike."""

    power: float
    predicted: bool

    def ranks(self, jobs: ActiveJobs) -> Ints | None:
        """Numbers by which those that count more come first; None: all alike."""
        if not self.power:
            return None
        if self.predicted:
            return np.maximum(jobs.predicted_s, _SHORT_S)
        queues = np.searchsorted(_QUEUES_S[1:], jobs.attained_gpu_s, side="right")
        return queues.astype(
            np.int16
        )  # so that they are sorted without being compared, several times as fast

    def weights(self, jobs: ActiveJobs) -> Floats | None:
        """By how much each job counts; None: all alike."""
        ranks = self.ranks(jobs)
        if ranks is None:
            return None
        seconds = ranks if self.predicted else _QUEUES_S[ranks]
        found: Floats = (3600.0 / seconds) ** self.power
        return found
