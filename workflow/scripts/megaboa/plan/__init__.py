"""From a checked experiment to its runs: sweep multiplied out, expressions calculated, identities written down."""

from megaboa.plan.documents import table as plan_table
from megaboa.plan.make import make_plan
from megaboa.plan.model import Plan, Run, read_rows

__all__ = ["Plan", "Run", "make_plan", "plan_table", "read_rows"]
