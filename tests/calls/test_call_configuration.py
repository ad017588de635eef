"""megaboa.calls.configuration: the words of a call, and the experiment that `tune` runs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megaboa.calls.configuration import call_again, given_values, own_experiment, own_target
from megaboa.config import load
from megaboa.errors import InputError

MINE = """experiment: mine
tokenizers: {bpe: {train_on: stdlib, vocab_size: 512}}
corpora: {stdlib: {source: python-stdlib, limit: 20}}
models:
  dense:
    config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4}
    tokenizer: bpe
training: {train_iters: 10, global_batch_size: 4, micro_batch_size: 1, seq_length: 64}
"""


def test_values_of_the_command_line_are_given_again():
    assert given_values({}) == []
    assert given_values({"experiment": "x", "training": {"train_iters": 5}}) == [
        *("--config", "experiment=x", 'training={"train_iters": 5}')
    ]


def test_a_target_stands_where_configfile_does_not_take_it_for_a_file():
    assert call_again(["my.yaml"], {"a.b": 1}, "tune") == "snakemake tune --configfile my.yaml --config a.b=1"
    assert call_again([], {}, None) == "snakemake"


def test_prove_and_tune_are_called_one_after_the_other():
    assert own_target(["snakemake", "-n"]) is None and own_target(["snakemake", "tune", "-n"]) == "tune"
    with pytest.raises(InputError, match=r"^prove and tune each run an experiment of their own"):
        own_target(["snakemake", "tune", "prove"])


def test_problems_of_a_tuning_name_the_users_file_where_the_value_is_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine, more = Path("mine.yaml"), Path("more.yaml")
    mine.write_text(MINE)
    more.write_text("training: {train_iters: 20}\n")
    asked = load([mine, more], {"device": "cuda"})
    workflow = SimpleNamespace(config_settings=SimpleNamespace(config_args=["device=cuda"]))
    (path,), own = own_experiment(workflow, asked, "tune")
    places = {
        key: str(own.problem(tuple(key.split(".")), "").file)
        for key in ("device", "models.dense", "training.seq_length")
    }
    assert places == {"device": "--config", "models.dense": str(path), "training.seq_length": "mine.yaml"}
    assert str(own.problem(("training", "train_iters"), "").file) == str(path), "tuning takes fewer steps"
    assert own.notes == asked.notes
