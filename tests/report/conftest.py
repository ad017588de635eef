"""Profiles in these reports are made by the same module as those of tests/observe/traces."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "observe" / "traces"))


@pytest.fixture
def svg_alone(monkeypatch):
    """For tests that read the page: PDF and PNG take two thirds of a figure's time."""
    monkeypatch.setattr("megaboa.report.style.KINDS", ("svg",))
