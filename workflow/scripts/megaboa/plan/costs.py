"""What a plan costs, as far as it is known before preflight, and whether that is within its budget."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megaboa.config.models.resources import Budget
from megaboa.estimate import costs, history
from megaboa.estimate.costs import Costs
from megaboa.plan.model import Run


def costs_of(runs: Collection[Run], exports: Collection[str], budget: Budget, results: Path) -> list[Costs | None]:
    """Per run; None where the model isn't known yet."""
    speeds = history.speeds(results)
    return [
        costs.of_run(
            run.facts,
            given=run.config.resources.step_seconds,
            measured=speeds.get(history.key(run.run, run.config.resources.gpu)),
            mfu=budget.mfu,
            exported=run.name in exports,
        )
        for run in runs
    ]


def over_budget(runs: Collection[Run], exports: Collection[str], budget: Budget, results: Path) -> dict[str, str]:
    """What exceeds the budget, by key."""
    if budget.gpu_hours is None and budget.disk is None:
        return {}
    found = costs.total(costs_of(runs, exports, budget, results))
    return costs.over_budget(found, budget.gpu_hours, budget.disk)
