"""From a checked experiment to its runs: sweep multiplied out, expressions calculated, identities written down."""

from megaboa.plan.make import make_plan
from megaboa.plan.plan import Plan, Run

__all__ = ["Plan", "Run", "make_plan"]
