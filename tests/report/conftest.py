"""Profiles in these reports are made by the same module as those of tests/observe/traces."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "observe" / "traces"))
