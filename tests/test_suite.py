"""What runs the tests: which files, in which order, until when."""

import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import suite

from megaboa.check import calibration

TESTS = Path(__file__).parent
LIBRARY = TESTS.parent / "workflow" / "scripts" / "megaboa"


def test_every_slow_file_is_walked_or_left_to_the_rest():
    slow = {
        f"tests/{path.relative_to(TESTS)}"
        for path in TESTS.rglob("test_*.py")
        if re.search(r"\bmark\.slow\b", path.read_text()) and "gpus" not in path.parts
    }
    assert {*suite.slow_files("walks"), *suite.slow_files("rest")} == slow


def test_every_file_has_a_name_of_its_own():
    """Two of one name can't be collected by one call of pytest."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_what_a_slow_file_exercises_is_known():
    packages = {path.name for path in LIBRARY.iterdir() if path.is_dir()}
    rest = suite.slow_files("rest")
    for name in rest:
        known = set(suite.exercised(name))
        assert known & packages, f"{name}: say in suite.EXERCISED what it exercises"
    assert all((TESTS.parent / name).exists() for name in suite.EXERCISED)


def test_calibrations_of_the_clone_are_not_read(tmp_path, monkeypatch):
    """The tutorial's reader has some, by `megaboa calibrate`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calibrations").mkdir()
    shutil.copy(calibration.SHIPPED / "h100.json", tmp_path / "calibrations" / "cpu.json")
    assert calibration.of("cpu") is None


def test_files_next_to_what_changed_come_first():
    files = ["tests/data/test_a.py", "tests/run/test_b.py", "tests/e2e/test_bundle.py", "tests/e2e/test_export.py"]
    changed = ["workflow/scripts/megaboa/run/claims.py", "tests/e2e/test_bundle.py", "workflow/rules/export.smk"]
    first, *near, last = suite.order(files, changed)
    assert first == "tests/e2e/test_bundle.py" and last == "tests/data/test_a.py"
    assert set(near) == {"tests/run/test_b.py", "tests/e2e/test_export.py"}


def test_the_storm_comes_before_what_changed_and_is_never_left_out(monkeypatch):
    (storm,) = suite.CERTAIN
    assert storm in suite.slow_files("rest")
    assert suite.order(["tests/run/test_b.py", storm], ["tests/run/test_b.py"])[0] == storm
    monkeypatch.setattr(suite, "start", lambda name, *_: suite.Running(name, Path("/dev/null"), Ended()))
    tally = suite.Tally()
    assert suite.run_files("rest", [storm, "tests/run/test_b.py"], time.time() - 1, tally) == ["tests/run/test_b.py"]
    assert tally.counts["passed"] == 0 and not tally.failed


class Ended:
    """Stands in for a pytest that has ended."""

    returncode = 0

    def poll(self):
        return self.returncode


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    """The pytests that these tests start import none."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def test_without_time_nothing_is_started_and_all_is_named(capsys):
    tally = suite.Tally()
    assert suite.run_files("rest", ["tests/none.py"], time.time() - 1, tally) == ["tests/none.py"]
    assert suite.conclude(tally, ["tests/none.py"], 3300.0) == 1
    assert "no time was left for 1 files:\n  tests/none.py\n" in capsys.readouterr().out


def test_a_long_file_is_not_started_shortly_before_the_end(tmp_path):
    short = tmp_path / "test_short.py"
    short.write_text(f"import pytest\n\n@pytest.mark.{'slow'}\ndef test_it():\n    pass\n")
    tally = suite.Tally()
    assert suite.run_files("rest", ["tests/cluster/none.py", str(short)], time.time() + 600, tally) == [
        "tests/cluster/none.py"
    ]
    assert tally.counts["passed"] == 1


def test_a_file_whose_pytest_is_killed_is_listed_with_how_it_ended(capsys):
    tally = suite.Tally()
    tally.add("tests/run/test_b.py", -9, "...\n")
    assert suite.conclude(tally, [], 60.0) == 1
    assert "  tests/run/test_b.py: pytest ended with -9" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("body", "code", "counts"), [("assert True", 0, "1 passed"), ("assert 3 == 4", 1, "1 failed")])
def test_a_file_that_fails_is_shown_whole_and_counts(tmp_path, capsys, body, code, counts):
    path = tmp_path / "test_one.py"
    path.write_text(f"import pytest\n\n@pytest.mark.{'slow'}\ndef test_it():\n    {body}\n")
    tally = suite.Tally()
    assert suite.run_files("rest", [str(path)], None, tally) == []
    assert suite.conclude(tally, [], 60.0) == code
    said = capsys.readouterr().out
    assert counts in said and ("assert 3 == 4" in said) == bool(code)
    assert said.splitlines()[-1] == f"{1 - code} passed, {code} failed, 0 skipped"


def test_an_error_of_collection_is_no_success(tmp_path, capsys):
    path = tmp_path / "test_broken.py"
    path.write_text("import nothing_of_this_name\n")
    tally = suite.Tally()
    suite.run_files("rest", [str(path)], None, tally)
    assert suite.conclude(tally, [], 60.0) == 1
    assert "nothing_of_this_name" in capsys.readouterr().out
