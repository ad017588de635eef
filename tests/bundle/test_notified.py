"""megaboa.bundle.notified: a webhook's address stays with its user."""

import json

import pytest
import yaml

from megaboa.bundle.notified import INSTEAD, without
from megaboa.files import canonical

HOOK = "https://hooks.example.com/services/T0/B0/s3cr3t"


@pytest.mark.parametrize(
    "notify",
    [
        f"curl -d done {HOOK}",
        f"'curl -d ''done'' {HOOK}'",
        f'"curl -d \\"done\\" {HOOK}"',
        f"|\n    curl {HOOK}\n    true",
        f">-\n    curl\n    {HOOK}",
        f"[curl {HOOK}, 'wget {HOOK}']",
    ],
)
def test_in_a_configuration_whatever_its_quotes(notify):
    text = f"# mine\nrecovery:\n  notify: {notify}\n  budget: 3  # few\ntraining: {{seed: 1}}\n"
    clean = without("config/mine.yaml", text.encode()).decode()
    assert "hooks" not in clean and clean.startswith("# mine\n") and "budget: 3  # few" in clean
    before, after = yaml.safe_load(text), yaml.safe_load(clean)
    told = after["recovery"].pop("notify")
    assert told == INSTEAD or told == [INSTEAD] * 2
    before["recovery"].pop("notify")
    assert before == after


def test_swept_or_by_the_whole_key():
    text = f"""sweep:
  runs:
    a: {{recovery.notify: 'curl {HOOK}', training.seed: 1}}
    b: {{recovery: {{notify: {HOOK}}}}}
"""
    clean = yaml.safe_load(without("mine.yaml", text.encode()))
    assert clean["sweep"]["runs"]["a"] == {"recovery.notify": INSTEAD, "training.seed": 1}
    assert clean["sweep"]["runs"]["b"]["recovery"]["notify"] == INSTEAD


def test_in_what_the_plan_wrote():
    launch = {"recovery": {"notify": f"curl {HOOK}", "budget": 5}, "notify": "not that one", "nodes": 1}
    clean = json.loads(without("results/mine/runs/a/launch.json", canonical(launch).encode()))
    assert clean == launch | {"recovery": {"notify": INSTEAD, "budget": 5}}


def test_all_else_stays_to_the_letter():
    for name, text in (
        ("mine.yaml", "recovery: {notify: null, budget: 3}\nb: [1,   2]\n"),
        ("a.json", '{"recovery": {"notify": null}}'),
        ("a.json", "{ }"),
        ("a.tsv", f"notify\t{HOOK}"),
        ("empty.yaml", ""),
    ):
        assert without(name, text.encode()) == text.encode()
