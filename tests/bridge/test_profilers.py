"""The interface that profilers attach to. Bridge calls them in tests/e2e/test_profile.py."""

import pstats
from pathlib import Path

import pytest

from megaboa.bridge.profilers import Profiler, of_file
from megaboa.data.errors import InputError

CPROFILE = Path(__file__).parents[2] / "profilers" / "cprofile.py"


def test_a_profiler_of_ten_lines_is_one(tmp_path):
    """The one of the documentation."""
    profiler = of_file(CPROFILE)(tmp_path, 3)
    assert isinstance(profiler, Profiler)
    profiler.step()
    profiler.start()
    sorted([3, 1, 2])
    profiler.stop()
    calls = {name for _, _, name in pstats.Stats(str(tmp_path / "rank-3.pstats")).stats}
    assert "<built-in method builtins.sorted>" in calls


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (None, "there is no Python file"),
        ("x = 1", "has no class Profiler"),
        ("Profiler = print", "has no class Profiler"),
    ],
)
def test_what_is_no_profiler_is_named(tmp_path, code, says):
    path = tmp_path / "mine.py"
    if code:
        path.write_text(code)
    with pytest.raises(InputError, match=says):
        of_file(path)
