"""For all tests: processes that they start find the library as they do themselves."""

import os
from pathlib import Path

os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "workflow" / "scripts")
