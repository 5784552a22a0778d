"""How often policies decide in a simulation where nobody says so."""

from cumulo.cluster.decide.policies import NamedPolicy

ROUND_S = 60.0
_MANY_JOBS = 10_000


def usual_interval_s(policy: NamedPolicy, jobs: int) -> float:
    """Seconds between two decisions; 0: at every event. Policies that look at every running job decide in rounds
    where jobs are many, as the systems they follow do."""
    return ROUND_S if policy.in_rounds and jobs >= _MANY_JOBS else 0.0
