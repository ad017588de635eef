"""A recipe decides what the plan can't know; the report has it from preflight."""

import pandas as pd
from fake_runs import FakeExperiment

from megaboa.files import write_json
from megaboa.report.frames import Frames
from megaboa.report.runs import load_runs
from megaboa.report.tables import runs_table

OPEN = dict.fromkeys(("tp", "pp", "vpp", "cp", "ep", "sp", "dp", "mbs", "train_iters", "tokens"), "recipe")
LAYOUT = {"tp": 2, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "sp": True}


def measured(tmp_path):
    experiment = FakeExperiment(tmp_path)
    for run in ("checked", "unchecked"):
        experiment.completed_run(run, steps=20)
        experiment.measure(run)
    plan = pd.read_csv(experiment.results / "plan.tsv", sep="\t").assign(**OPEN)
    plan.to_csv(experiment.results / "plan.tsv", sep="\t", index=False)
    training = {"mbs": 4, "gbs": 8, "seq_length": 64, "iters": 20}
    checked = {"facts": {"layout": LAYOUT, "training": training}, "data_parallel_size": 1}
    write_json(experiment.results / "preflight.json", {"runs": {"checked": checked}})
    return load_runs(experiment.results)


def test_the_plan_is_filled_in_and_layouts_are_named(tmp_path):
    checked, unchecked = runs = measured(tmp_path)
    assert {name: checked.plan[name] for name in OPEN} == {
        **{"tp": "2", "pp": "1", "vpp": "-", "cp": "1", "ep": "1", "sp": "true"},
        **{"dp": "1", "mbs": "4", "train_iters": "20", "tokens": "10240"},
    }
    assert {name: unchecked.plan[name] for name in OPEN} == OPEN
    assert (checked.layout, unchecked.layout) == ("tp2 sp", "recipe")
    assert list(runs_table(runs, Frames(runs))["layout"]) == ["tp2 sp", "recipe"]
