"""From a checked experiment to its runs: sweep multiplied out, expressions calculated, identities written down."""

from megaboa.plan.plan import Plan, Run
from megaboa.plan.planner import make_plan

__all__ = ["Plan", "Run", "make_plan"]
