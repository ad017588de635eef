"""The interface that profilers attach to. Bridge calls them in tests/e2e/test_profile.py."""

import pstats
from pathlib import Path

import pytest

from megaboa.bridge import profilers
from megaboa.bridge.profilers import Capture, Profiler, of_file
from megaboa.config.models.outputs import TOOLS
from megaboa.errors import InputError
from megaboa.store_paths import AttemptFolder

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


def test_every_tool_has_a_folder_of_its_own(tmp_path):
    """Readers of stores know these names: PyTorch's is Bridge's."""
    names = {tool: AttemptFolder(tmp_path).traces(tool).name for tool in (*TOOLS, "mine/nsys.py")}
    own = {tool: tool for tool in TOOLS}
    assert names == {**own, "pytorch": "torch_profile", "mine/nsys.py": "profiler"}


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


def test_a_file_may_hold_a_dataclass(tmp_path):
    code = """
from __future__ import annotations
import dataclasses

@dataclasses.dataclass
class Settings:
    size: int = 3

class Profiler:
    def __init__(self, folder, rank):
        self.size = Settings().size
"""
    (tmp_path / "profile.py").write_text(code)
    assert of_file(tmp_path / "profile.py")(tmp_path, 0).size == 3


@pytest.mark.parametrize(
    ("first", "called"),
    [
        (0, "made step step step start step stop"),
        (3, "made step start stop"),
        (4, ""),
    ],
)
def test_steps_of_a_run_that_resumes(tmp_path, first, called):
    """Steps 3 and 4 are captured, of a run that goes on after step `first`."""
    calls = []

    class Told(Profiler):
        def __init__(self, folder, rank):
            calls.append("made")

        def step(self):
            calls.append("step")

        def start(self):
            calls.append("start")

        def stop(self):
            calls.append("stop")

    capture = Capture(Told, tmp_path)
    for iteration in range(first, 6):
        capture.before_step(iteration, 0, 2, 4)
        if iteration + 1 == 4:
            capture.end()
    assert " ".join(calls) == called


def test_calls_that_viztracer_has_lost_are_told(tmp_path, monkeypatch, capsys):
    pytest.importorskip("viztracer")
    for kept, warns in ((100_000, False), (100, True)):
        monkeypatch.setattr(profilers, "CALLS", kept)
        tracer = profilers.VizTracer(tmp_path, 3)
        tracer.start()
        for number in range(1000):
            abs(number)
        tracer.stop()
        assert ("rank-3.json has the newest 100 calls only" in capsys.readouterr().err) == warns
