"""From a checked experiment to its runs: expands the sweep, evaluates expressions, writes identities."""

from megaboa.plan.make import make_plan
from megaboa.plan.plan import Plan, Run

__all__ = ["Plan", "Run", "make_plan"]
