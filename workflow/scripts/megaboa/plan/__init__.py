"""From a checked experiment to its runs: expands the sweep, evaluates expressions, writes identities."""

from megaboa.plan.plan import Plan, Run
from megaboa.plan.planner import make_plan

__all__ = ["Plan", "Run", "make_plan"]
