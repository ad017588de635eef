"""Real captures of GPUs, one folder each in `gpu/`, with the run's run.json beside the traces where it is known.

A folder holds what `trace.json` of a small run names: `rank-<rank>.json.gz` or `.sqlite`, a few MB at most.
"""

from pathlib import Path

import pytest
from as_written import analyse

from megaboa.layout import Layout
from megaboa.observe.traces.analysis import Expected
from megaboa.records import RunSpec, read

CAPTURES = sorted(path for path in (Path(__file__).parent / "gpu").glob("*") if path.is_dir())


@pytest.fixture(scope="module", params=CAPTURES or [None], ids=lambda path: path and path.name)
def document(request):
    if request.param is None:
        pytest.skip("there is no capture of a GPU in tests/observe/traces/gpu")
    run = request.param / "run.json"
    return analyse([request.param], Expected(layout=Layout.of_run(read(RunSpec, run)) if run.exists() else None))


def test_every_step_adds_up(document):
    assert document["device"] == "gpu" and document["budget"]
    for row in document["budget"]:
        parts = row["compute"] + row["exposed"] + (row["copies_exposed"] or 0.0) + row["idle"]
        assert row["wall"] == pytest.approx(parts) and row["compute"] > 0


def test_kernels_are_known_by_their_class(document):
    codes = {finding["code"] for finding in document["findings"]}
    assert not codes & {"no_cuda", "no_calls", "truncated", "malformed", "no_steps", "two_sessions", "rank_unknown"}
    for details in document["details"].values():
        work = {row["class"]: row["work_ms"] for row in details["classes"]}
        assert work["GEMM"] > 0 and work.get("other", 0.0) < 0.1 * sum(work.values())


def test_collectives_of_several_ranks_are_matched(document):
    if len(document["ranks"]) < 2:
        pytest.skip("one rank")
    operations = {row["operation"] for details in document["details"].values() for row in details["collectives"]}
    assert operations & {"AllReduce", "AllGather", "ReduceScatter"}
    assert all(row["communication"] > 0 for row in document["budget"])
    assert document["clocks"] and {row["window"].split(" of ")[0] for row in document["ranks"]}
