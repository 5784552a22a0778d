"""A given layout whose software nobody names: timed under every software it was probably run with.
`cumulo plan train --fixed` without --software, and `cumulo plan validate --unnamed`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cumulo.base.nearest import did_you_mean
from cumulo.base.strict import package_yaml
from cumulo.errors import ConfigError
from cumulo.plan.evidence import weights as evidence
from cumulo.plan.evidence.published import LEAST, MOST_MEMORY, TOO_LARGE, clues, likely
from cumulo.plan.job import TrainJob
from cumulo.plan.memory.ledger import Interval
from cumulo.plan.memory.peak import peak_memory
from cumulo.plan.search.fixed import Fitted, fitted, fixed_job, said_in
from cumulo.plan.search.search import Plan, timed
from cumulo.plan.search.space import TrainGoal
from cumulo.plan.time.efficiency import GENERATIONS
from cumulo.plan.time.step import estimate


@dataclass(frozen=True, slots=True)
class LikelyJob:
    """The job as a software does it, and how likely that is."""

    software: str
    probability: float
    job: TrainJob  # with what it saves memory by, where it needs that to fit
    fits: Fitted


def likely_jobs(text: str, goal: TrainGoal, without: str = "") -> tuple[LikelyJob, ...]:
    """Most likely first; probabilities add up to 1. `without`: a source whose jobs are not known."""
    if goal.cluster.device.generation not in GENERATIONS:  # nobody published jobs of such devices
        fits = fitted(fixed_job(text, goal), goal.memory_limit_bytes, said_in(text))
        return (LikelyJob(goal.software, 1.0, fits.job, fits),)
    described = fixed_job(text, goal)
    seen = likely(clues(described, goal.cluster, "zero" in said_in(text)), without, goal.date)
    found = []
    for name, probability in seen:
        try:
            job = fixed_job(text, replace(goal, software=name))
        except ConfigError:  # it cannot do this
            continue
        if peak_memory(job).total > MOST_MEMORY * goal.memory_limit_bytes:
            probability *= TOO_LARGE
        fits = fitted(job, goal.memory_limit_bytes, said_in(text))
        found.append(LikelyJob(name, probability, fits.job, fits))
    if not found:
        raise ConfigError("no known software runs this layout; name one with --software")
    total = sum(one.probability for one in found)
    kept = [one for one in found if one.probability >= LEAST * total]
    total = sum(one.probability for one in kept)
    shares = [replace(one, probability=one.probability / total) for one in kept]
    return tuple(sorted(shares, key=lambda one: -one.probability))


def timed_unnamed(text: str, goal: TrainGoal) -> tuple[Plan, Fitted]:
    """Timed as the most likely software does it; the time is the mean over all that are likely, and the
    interval is that of published rows whose software was not named either."""
    jobs = likely_jobs(text, goal)
    if len(jobs) == 1 and jobs[0].software == goal.software:
        return timed(jobs[0].job, goal), jobs[0].fits
    plans = {one.software: timed(one.job, goal) for one in jobs}
    first = plans[jobs[0].software]
    step_s = math.exp(sum(one.probability * math.log(plans[one.software].estimate.step_s) for one in jobs))
    half = evidence.half_width(first.job, goal.cluster, unnamed=True)
    slower, found = step_s / first.estimate.step_s, first.estimate
    named = ", ".join(f"{one.software} {one.probability:.0%}" for one in jobs[:4])
    told = (
        f"software not named: jobs described like this ran {named}; the time is the mean over them; "
        "`cumulo plan train --software` narrows the range"
    )
    estimate = replace(
        found,
        step_s=step_s,
        breakdown=tuple((name, slower * seconds) for name, seconds in found.breakdown),
        tokens_per_s=found.tokens_per_s / slower,
        mfu=found.mfu / slower,
        hfu=found.hfu / slower,
        interval=Interval(step_s * math.exp(-half), step_s * math.exp(half)),
        evidence=(told, *found.evidence),
    )
    return Plan(first.job, estimate), jobs[0].fits


def widened(plan: Plan, goal: TrainGoal) -> Plan:
    """A plan that was searched for under today's software, with an interval that reaches to what jobs like it
    took with the software they were probably run with."""
    traits, job = goal.known_software, plan.job
    if traits is None or goal.cluster.device.generation not in GENERATIONS:
        return plan
    logs = total = 0.0
    for name, probability in likely(clues(job, goal.cluster), date=goal.date):
        if probability >= LEAST:
            other = replace(goal, software=name).job(job.layout, job.micro_batch, job.recompute)
            logs += probability * math.log(estimate(other, goal.cluster, explain=False).step_s)
            total += probability
    mean, half = math.exp(logs / total), evidence.half_width(job, goal.cluster, unnamed=True)
    found = plan.estimate
    low, high = (
        min(found.interval.low, mean * math.exp(-half)),
        max(found.interval.high, mean * math.exp(half)),
    )
    told = (
        f"software not named: today's, {traits.name}, is assumed, and the range reaches to what jobs like this "
        "took with other software; `cumulo plan train --software` narrows it"
    )
    return replace(
        plan, estimate=replace(found, interval=Interval(low, high), evidence=(told, *found.evidence))
    )


def remarks(text: str, plan: Plan, fits: Fitted, limit_bytes: int) -> Iterator[str]:
    """What the planner assumed of a given layout."""
    if plan.job.layout.pp > 1 and not {"schedule", "chunks"} & said_in(text):
        yield f"--fixed names no schedule: {plan.job.layout.schedule} is assumed; schedule=... changes it"
    if fits.saved_by:
        yield (
            f"as given, this layout needs {fits.needed_bytes / 2**30:.3g} GiB per GPU, and "
            f"{limit_bytes / 2**30:.3g} GiB are available: it is predicted with {', '.join(fits.saved_by)}"
        )


def system_named(name: str) -> Mapping[str, Any]:
    """Choices named as the command's options are, `layout` as --fixed takes it, and `source`."""
    known: Mapping[str, Mapping[str, Any]] = package_yaml("cumulo.plan", "data/systems.yaml")
    if name not in known:
        hint = did_you_mean(name, known, quoted=True, otherwise=".")
        raise ConfigError(f"--like does not know {name!r}{hint} It knows: {', '.join(known)}")
    return known[name]
