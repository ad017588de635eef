"""Analyses and comparisons as their files have them."""

from megaboa.observe.traces import analysis, comparison
from megaboa.records import Analysis, parse, plain


def analyse(*asked):
    return plain(analysis.analyse(*asked))


def compare(before, after):
    return plain(comparison.compare(*(parse(Analysis, one, "analysis.json") for one in (before, after))))
