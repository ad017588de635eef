"""Published tables: every one that is shipped can be read, and a mistake in one is told with its place."""

import pytest

from megaboa.config import ConfigError, load
from megaboa.config.published import FOLDER, PublishedError, load_published
from megaboa.plan import make_plan

GOOD = """\
title: a table
source: a page
conditions: {seq_length: 1024}
rows:
  - {name: one, conditions: {world_size: 1}, values: {step_seconds: [0.4, 0.5], mfu: 0.4}}
"""
EXPERIMENT = f"""\
experiment: good
device: cpu
models: {{m: {{recipe: {FOLDER.parents[1] / "recipes" / "gpt_tiny.py"}}}}}
"""


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.yaml")))
def test_every_table_that_is_shipped(name):
    table = load_published(name)
    assert table["source"] and all(row["values"] for row in table["rows"])


def test_the_table_of_two_h200s_is_complete():
    rows = {row["name"]: row["values"] for row in load_published("gpt2-large-2xh200")["rows"]}
    assert rows["TP2 + SP"] == {"step_seconds": [0.539, 0.541], "memory_mib": [71571, 71571]}
    assert rows["PP2, one micro-batch"]["step_seconds"] == [0.813, 0.822] and len(rows) == 6


@pytest.mark.parametrize(
    ("table", "row", "conditions", "values"),
    [
        (
            "megatron-bridge-25.11",
            "LLAMA3_8B, 8 H100, FP8-CS",
            {"world_size": 8, "gbs": 128, "mbs": 1, "seq_length": 8192, "fsdp": "megatron", "gpu": "NVIDIA H100"},
            {"tokens_per_second_per_gpu": [14451, 14451], "tflops_per_gpu": [744, 744]},
        ),
        (
            "megatron-bridge-25.11",
            "LLAMA3.1_405B, 128 B200, FP8-MX",  # the numbers in parentheses
            {"tp": 4, "pp": 8, "cp": 2, "vpp": 8, "precision": "bf16_with_mxfp8_mixed"},
            {"tokens_per_second_per_gpu": [624, 624], "tflops_per_gpu": [1576, 1576]},
        ),
        (
            "megatron-bridge-26.02",
            "Qwen3_235B_a22B, 256 H100, FP8",
            {"tp": 2, "pp": 8, "vpp": 4, "ep": 32, "gbs": 8192},
            {"tokens_per_second_per_gpu": [1633, 1633], "tflops_per_gpu": [242, 242]},
        ),
        (
            "torchtitan-llama3-8b-h200",
            "8 nodes",
            {"world_size": 64},
            {"tokens_per_second_per_gpu": [10753, 10753], "memory_mib": [48097, 48097]},
        ),
    ],
)
def test_rows_are_what_was_published(table, row, conditions, values):
    [found] = [one for one in load_published(table)["rows"] if one["name"] == row]
    assert conditions.items() <= found["conditions"].items() and found["values"] == values


@pytest.mark.parametrize(
    ("old", "new", "hint"),
    [
        ("mfu: 0.4", "mfu: fast", "mfu"),
        ("mfu: 0.4", "speed: 1", "speed"),
        ("seq_length", "sequence", "sequence"),
        ("[0.4, 0.5]", "[0.5, 0.4]", "0.5 is more than 0.4"),
        ("[0.4, 0.5]", "[0.4]", "step_seconds"),
        ("title: a table\n", "", "title"),
        ("source: a page", "source: a page\nsource: again", "source"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path, old, new, hint):
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(PublishedError) as error:
        load_published(str(path))
    assert str(path) in str(error.value) and hint in str(error.value)


def test_an_experiment_names_a_table_that_is_not_there(tmp_path):
    path = tmp_path / "good.yaml"
    path.write_text(EXPERIMENT + "report: {compare_to: gpt2-large-2xh20}\n")
    with pytest.raises(ConfigError, match=r"good.yaml:4: report.compare_to: .*did you mean 'gpt2-large-2xh200'"):
        make_plan(load([path]))
    path.write_text(EXPERIMENT + f"report: {{compare_to: {tmp_path}/none.yaml}}\n")
    with pytest.raises(ConfigError, match="there is no file"):
        make_plan(load([path]))


def test_the_table_is_part_of_what_the_report_is_made_of(tmp_path):
    table, path = tmp_path / "mine.yaml", tmp_path / "good.yaml"
    table.write_text(GOOD)
    path.write_text(EXPERIMENT + f"report: {{compare_to: {table}}}\n")
    assert make_plan(load([path])).published["rows"][0]["values"]["mfu"] == [0.4, 0.4]
