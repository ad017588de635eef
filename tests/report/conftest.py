"""The trees of results that these tests report on are made by the same module as those of tests/observe."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "observe"), str(Path(__file__).parents[1] / "observe" / "traces")]
