"""A webhook's address is in nothing that is published."""

import json

import pytest
import yaml

from megaboa.config.notify import INSTEAD, addresses, in_command, in_yaml, without_notify
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
    clean = without_notify("config/mine.yaml", text.encode()).decode()
    assert "hooks" not in clean and clean.startswith("# mine\n") and "budget: 3  # few" in clean
    before, after = yaml.safe_load(text), yaml.safe_load(clean)
    told = after["recovery"].pop("notify")
    assert told == INSTEAD or told == [INSTEAD] * 2
    before["recovery"].pop("notify")
    assert before == after


@pytest.mark.parametrize(
    "text",
    [
        "recovery:\n  <<: {notify: curl HOOK}\n  budget: 3\n",
        "a: &one\n  notify: 'curl HOOK'\nrecovery: *one\n",
        "recovery:\n  notify: &one 'curl HOOK'\nb: {recovery: {notify: *one}}\nc: *one\n",
        "recovery:\n  notify: !!str curl HOOK\n",
    ],
)
def test_aliases_and_merged_mappings(text):
    clean = in_yaml(text.replace("HOOK", HOOK))
    loaded = yaml.safe_load(clean)
    assert HOOK not in clean and loaded["recovery"]["notify"] == INSTEAD
    assert loaded.keys() == yaml.safe_load(text).keys()


def test_swept_or_by_the_whole_key():
    text = f"""sweep:
  runs:
    a: {{recovery.notify: 'curl {HOOK}', training.seed: 1}}
    b: {{recovery: {{notify: {HOOK}}}}}
"""
    clean = yaml.safe_load(without_notify("mine.yaml", text.encode()))
    assert clean["sweep"]["runs"]["a"] == {"recovery.notify": INSTEAD, "training.seed": 1}
    assert clean["sweep"]["runs"]["b"]["recovery"]["notify"] == INSTEAD


def test_in_what_the_plan_wrote():
    launch = {"recovery": {"notify": f"curl {HOOK}", "budget": 5}, "notify": "not that one", "nodes": 1}
    clean = json.loads(without_notify("results/mine/runs/a/launch.json", canonical(launch).encode()))
    assert clean == launch | {"recovery": {"notify": INSTEAD, "budget": 5}}


def test_all_else_stays_to_the_letter():
    for name, text in (
        ("mine.yaml", "recovery: {notify: null, budget: 3}\nb: [1,   2]\n"),
        ("a.json", '{"recovery": {"notify": null}}'),
        ("a.json", "{ }"),
        ("a.tsv", f"notify\t{HOOK}"),
        ("empty.yaml", ""),
    ):
        assert without_notify(name, text.encode()) == text.encode()


@pytest.mark.parametrize(
    "words",
    [
        "'recovery.notify=COMMAND'",
        """'recovery={"budget": 1, "notify": "COMMAND"}' a=b""",
        """'sweep={"runs": {"a": {"recovery.notify": "COMMAND"}}}'""",
    ],
)
def test_in_a_call_of_snakemake(words):
    call = f"snakemake --configfile a.yaml --config {words}"
    assert in_command(call.replace("COMMAND", f"curl {HOOK}")) == call.replace("COMMAND", INSTEAD)


def test_another_call_stays_to_the_letter():
    call = f"""snakemake   --config x='{{"a":1}}' 'y={HOOK}'"""
    assert in_command(call) == call


def test_addresses_as_far_as_no_format_escapes_them():
    trees = [
        {"recovery": {"notify": f"curl '{HOOK}?a=1&b=2' -d \"$MEGABOA_RUN\""}},
        {"recovery.notify": "mail me", "notify": "curl https://other/x", "recovery": {"notify": "curl https://plain"}},
    ]
    assert addresses(trees) == {f"{HOOK}?a=1"}
