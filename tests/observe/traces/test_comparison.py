"""Two profiles with a known difference, and the script that anybody can call."""

import pytest
from as_written import analyse, compare
from called import called
from test_analysis import codes_of, tell
from test_read_captures import HOST_RANGES

from megaboa.files import read_json, write_json


def slower(**values):
    """The GEMM takes 60 µs longer; so does what of the all-reduce it covers."""
    return tell(slow=60.0, **values)


def written(folder, name, story, form="pytorch"):
    (folder / name).mkdir()
    story.write(folder / name, form)
    return folder / name


@pytest.fixture
def before(tmp_path, form):
    return written(tmp_path, "before", tell(), form)


@pytest.fixture
def after(tmp_path, form):
    return written(tmp_path, "after", slower(), form)


def test_what_got_slower_is_named_with_a_ceiling(before, after):
    found = compare(analyse([before]), analyse([after]))
    rows = {(row["of"], row["name"]): row for row in found["rows"]}
    assert found["mismatches"] == [] and found["step"]["delta"] == 0.0 and found["n"] == [3, 3]
    row = rows["class", "GEMM"]
    assert (row["before"], row["after"], row["delta"]) == pytest.approx((0.3, 0.36, 0.06))
    assert row["gain_ceiling"] == pytest.approx(1 / 0.94 - 1)
    assert rows["phase", "forward"]["delta"] == pytest.approx(0.06)
    assert rows["time", "compute"]["delta"] == pytest.approx(0.06)
    assert rows["time", "exposed"]["delta"] == pytest.approx(-0.06) and rows["time", "exposed"]["gain_ceiling"] == 0.0
    assert rows["class", "norm"]["delta"] == 0.0
    assert any(line.startswith("class GEMM: 0.3 ms to 0.36 ms (+0.06 ms a step; removing") for line in found["summary"])
    assert len(found["summary"]) <= 10 and not any("norm" in line for line in found["summary"])


def test_profiles_that_differ_in_kind_are_compared_with_care(tmp_path):
    one = analyse([written(tmp_path, "one", tell())])
    other = tell(world_size=2)
    other.rank = 1
    two = analyse([written(tmp_path, "two", other, "nsys")])
    found = compare(one, two)
    assert found["summary"] == ["The two profiles have no rank in common."]
    assert [text.split(" differ")[0] for text in found["mismatches"]] == ["ranks", "devices", "world sizes", "tools"]


def test_what_one_side_does_not_know_is_not_compared(tmp_path):
    capture = tell()
    capture.ranges = [row for row in capture.ranges if row[0].startswith("Prof")]
    capture.copies.clear()
    found = compare(analyse([written(tmp_path, "one", tell())]), analyse([written(tmp_path, "two", capture)]))
    assert ("time", "copies_exposed") not in {(row["of"], row["name"]) for row in found["rows"]}


def call(*arguments, code=0):
    done = called("analyze-profile", *arguments)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_the_command_writes_the_analysis_figures_and_a_comparison(tmp_path, before, after, monkeypatch):
    monkeypatch.setattr("megaboa.report.style.KINDS", ("svg", "png"))
    earlier = tmp_path / "earlier.json"
    call(before, "--out", earlier)
    out, figures = tmp_path / "analysis.json", tmp_path / "figures"
    said = call(after, "--out", out, "--figures", figures, "--against", earlier)
    document = read_json(out)
    assert document["summary"] == said.splitlines()[: len(document["summary"])]
    assert document["comparison"]["rows"] and "class GEMM" in said
    drawn = {path.name for path in figures.glob("*.png")}
    assert drawn == {f"{name}.png" for name in ("classes", "exposed", "ranks", "sizes", "timeline")}
    assert document["comparison"] == read_json(out)["comparison"]
    assert call(after, "--against", before).splitlines()[-1] == said.splitlines()[-1]


def test_the_script_takes_what_was_asked_for_from_the_manifests(tmp_path):
    captures = written(tmp_path, "captures", tell(world_size=2))
    manifest = {"run": "a", "path": str(captures), "tool": "pytorch", "steps": [3, 8], "ranks": [0, 1], "traces": []}
    run = {"model": {}, "world_size": 2, "parallel": {"tp": 2, "pp": 1}}
    run["training"] = {"train_iters": 5, "micro_batch_size": 1, "global_batch_size": 4}
    write_json(tmp_path / "trace.json", manifest)
    write_json(tmp_path / "run.json", run)
    out = tmp_path / "analysis.json"
    call("--trace", tmp_path / "trace.json", "--out", out)
    document = read_json(out)
    assert {"missing_rank", "steps_outside"} <= codes_of(document)
    assert document["captures"][0]["part"] == "the whole model"


@pytest.mark.parametrize(("device", "said"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_captures_that_only_their_own_viewer_reads_are_of_the_runs_device(tmp_path, device, said):
    write_json(tmp_path / "trace.json", {"run": "a", "path": "captures", "tool": "cprofile", "traces": ["rank-0.x"]})
    training = {"train_iters": 5, "micro_batch_size": 1, "global_batch_size": 4}
    write_json(tmp_path / "run.json", {"world_size": 1, "training": training, "device": device})
    out = tmp_path / "analysis.json"
    call("--trace", tmp_path / "trace.json", "--out", out)
    assert read_json(out)["device"] == said
    call(tmp_path / "captures", "--out", out)
    assert read_json(out)["device"] is None, "nobody knows"


def test_captures_that_say_nothing_are_no_failure(tmp_path):
    (tmp_path / "rank-0.sqlite").write_bytes(b"SQLite format 3\0 and no more")
    assert "only the first bytes" in call(
        tmp_path, "--out", tmp_path / "analysis.json", "--figures", tmp_path / "figures"
    )
    assert not list((tmp_path / "figures").iterdir())
    assert "no rows of CUDA" in call(HOST_RANGES, "--figures", tmp_path / "figures")
    assert "give captures, or --trace" in call(code=2)
