"""Observes past and present runs: the steps of all attempts, summaries, and live progress."""
