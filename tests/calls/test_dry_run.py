"""megaboa.calls.dry_run: why a job would run."""

from types import SimpleNamespace

import pytest

from megaboa.calls.dry_run import reason

NO_REASON = {
    **dict.fromkeys(("forced", "noio", "nooutput"), False),
    **{name: set() for name in ("missing_output", "incomplete_output", "updated_input", "updated_input_run")},
    "is_provenance_triggered": lambda: False,
}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"missing_output": {"x/train.json"}, "updated_input_run": {"x/data.json"}}, "not made yet"),
        ({"updated_input": {"x/run.json", "x/data.json"}, "updated_input_run": {"x/data.json"}}, "run.json changed"),
        ({"updated_input_run": {"x/data.json"}, "updated_input": {"x/data.json"}}, "after merge_corpus"),
        ({"is_provenance_triggered": lambda: True}, "its input files, parameters or command changed"),
        ({"forced": True, "missing_output": {"x"}}, "forced"),
        ({"noio": True}, "always runs"),
        ({"incomplete_output": {"x"}}, "was cut off"),
    ],
)
def test_why_a_job_runs_in_a_few_words(found, said):
    before = [SimpleNamespace(rule=SimpleNamespace(name=name)) for name in ("merge_corpus", "image")]
    dag = SimpleNamespace(
        reason=lambda job: SimpleNamespace(**{**NO_REASON, **found}),
        job_dependencies=lambda job: before,
        needrun=lambda job: job is before[0],
    )
    assert reason(dag, None) == said
