"""The report: figures, checks and one page that is read from top to bottom."""
