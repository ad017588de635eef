"""Explains why a run failed and what to try, from its ledger, its logs and preflight's facts. Standard library only."""
