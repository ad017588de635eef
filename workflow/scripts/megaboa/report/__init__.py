"""The report: figures, checks and one page that a person reads from top to bottom."""
