"""megaboa.plan.one_run: what data, profile, tokenizer and recipe a run may have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from indexed_files import write_indexed

from megaboa.config import ConfigError
from megaboa.files import write_json
from megaboa.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
PlanOf = Callable[..., Plan]
CORPORA = "corpora: {a: {source: python-stdlib}, b: {source: 'hf:org/b'}, c: {source: 'hf:org/c'}}\n"


def test_a_run_reads_every_corpus_that_its_data_names(plan_of: PlanOf) -> None:
    plan = plan_of(CORPORA + "data: {blend_per_split: {train: {a: 2, b: 1}, valid: c}, validation_sets: {far: c}}")
    (run,) = plan.runs
    assert run.corpora == ("a", "b", "c")
    assert set(plan.corpus_tokenizers) == {"a", "b", "c"}
    assert run.run.data == {
        "blend_per_split": {"train": {"a": 2.0, "b": 1.0}, "valid": {"c": 1.0}, "test": None},
        "validation_sets": {"far": {"c": 1.0}},
    }
    assert run.row["data"] == "a:2,b:1"


def test_a_validation_set_may_be_the_held_out_share_of_one_corpus_of_the_blend(plan_of: PlanOf) -> None:
    plan = plan_of(CORPORA + "data: {blend: {a: 2, b: 1}, validation_sets: {a: a, far: c}}")
    assert plan.runs[0].run.data["validation_sets"] == {"a": {"a": 1.0}, "far": {"c": 1.0}}


def test_validation_on_training_files_is_refused_however_they_are_named(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text("{}")
        write_indexed(tmp_path / name, [[1, 2]])
    Path("list.json").write_text('{"train": ["a", "b"], "valid": ["b"]}')
    for train, valid in (
        ("source: '*.jsonl'", "source: b.jsonl"),
        ("source: [a.jsonl, b.jsonl]", "source: '[bc].jsonl'"),
        ("megatron: '*'", "megatron: b"),
        ("megatron: [1, a, 2, ./b]", "megatron: b"),
        ("megatron: list.json", "megatron: list.json, split: valid"),
    ):
        corpora = f"corpora: {{t: {{{train}}}, v: {{{valid}}}}}\n"
        for data in ("blend_per_split: {train: t, valid: v}", "blend: t, validation_sets: {far: v}"):
            with pytest.raises(ConfigError, match="names 'v', which has the source of 't', and that is trained on"):
                plan_of(corpora + f"data: {{{data}}}")
    plan_of("corpora: {t: {source: 'a*.jsonl'}, v: {source: b.jsonl}}\ndata: {blend_per_split: {train: t, valid: v}}")


def test_a_corpus_with_tokens_of_another_vocabulary_is_refused(plan_of: PlanOf, tmp_path: Path) -> None:
    def folder(name: str, *tokens: str) -> Path:
        vocab = {token: number for number, token in enumerate(tokens)}
        write_json(tmp_path / name / "tokenizer.json", {"model": {"vocab": vocab}, "added_tokens": []})
        return tmp_path / name

    mine, more, other = folder("mine", "a", "b"), folder("more", "a", "b", "c"), folder("other", "b", "a")

    def plan(model: object, corpus: object) -> Plan:
        text = f"corpora: {{t: {{source: python-stdlib}}, v: {{source: 'hf:org/v', tokenizer: {corpus}}}}}\n"
        data = "data: {blend_per_split: {train: t, valid: v}}\n"
        return plan_of(text + data, **{"models.dense.tokenizer": str(model), "training.train_iters": 10})

    plan(mine, more)
    with pytest.raises(ConfigError) as error:
        plan(mine, other)
    assert f"corpora.v.tokenizer: {other} has another vocabulary than {mine} of the model dense" in str(error.value)
    assert "token 0 is 'b' in one, and 'a' in the other" in str(error.value)
    with pytest.raises(ConfigError, match=r"corpora\.v\.tokenizer: .* bpe of the model dense: bpe is trained on text"):
        plan("bpe", mine)
    plan(mine, "org/unknown")


def test_a_corpus_of_the_same_source_with_other_texts_may_be_a_validation_set(plan_of: PlanOf, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text("def keep(record): return True")
    for text in ("split: test", "subset: de", "text_key: answer", f"filter: {tmp_path}/held.py"):
        copy = f"corpora: {{a: {{source: 'hf:org/a'}}, b: {{source: 'hf:org/a', {text}}}}}\n"
        assert plan_of(copy + "data: {blend_per_split: {train: a, valid: b}}").runs[0].corpora == ("a", "b")


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ("{blend: a, split: '100,0,0'}", "data.split"),
        ("{blend_per_split: {train: a}}", "data.blend_per_split.valid"),
    ],
)
def test_who_asks_for_evaluations_has_data_for_them(plan_of: PlanOf, data: str, remedy: str) -> None:
    asked = "training: {eval_interval: 100}\n"
    with pytest.raises(ConfigError, match=rf"training\.eval_interval: 100, .* set {remedy}, or remove"):
        plan_of(CORPORA + asked + f"data: {data}")
    plan_of(CORPORA + f"data: {data}")
    plan_of(CORPORA + "training: {eval_interval: 100, eval_iters: 0}\n" + f"data: {data}")
    plan_of(CORPORA + asked + "data: {blend: a}")


def test_blends_are_swept(plan_of: PlanOf) -> None:
    axis = "sweep: {grid: {data.blend: [a, {a: 1, b: 3}]}}"
    assert [run.name for run in plan_of(CORPORA + axis).runs] == ["data-a", "data-a1-b3"]
    axis = "sweep: {grid: {data.blend_per_split.train: [a, b]}}\ndata: {blend_per_split: {valid: c}}"
    with pytest.raises(ConfigError, match=r"data\.blend_per_split\.train: is missing"):
        plan_of(CORPORA + axis)
    axis = "sweep: {runs: {one: {data.blend: a}, two: {data.blend_per_split.train: a, data.blend_per_split.valid: b}}}"
    assert [run.corpora for run in plan_of(CORPORA + axis).runs] == [("a",), ("a", "b")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("profile: {tool: nsys}\ndevice: cpu", "nothing to record with device: cpu: nsys sees the steps of a GPU"),
        ("profile: {tool: memory}\ndevice: cpu", "nothing to record with device: cpu: snapshots are of CUDA"),
        ("profile: {tool: pytorch, steps: [0, 3]}", "profile.steps: [0, 3]: there is no step 0; nearest: [1, 3]"),
        ("profile: {tool: pytorch, ranks: [0, 3]}", "profile.ranks: [3] of 1 ranks; nearest: [0]"),
    ],
)
def test_a_profile_that_can_not_be_is_refused(plan_of: PlanOf, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        plan_of(text)
    assert plan_of("profile: {tool: nsys}\ndevice: cuda").runs[0].profile.tool == "nsys"
    assert plan_of("profile: {tool: none, ranks: [3]}").runs[0].profile.ranks == (3,)


def test_a_folder_without_a_tokenizer_is_refused_before_it_is_imported(plan_of, tmp_path):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "qwen3", "intermediate_size": 128, "vocab_size": 512, "head_dim": 16, **small}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = f"models: {{other: {{hf: {tmp_path}}}}}\nmodel: other\n"
    with pytest.raises(ConfigError, match=r"models\.other\.hf: .* has no tokenizer: set models\.other\.tokenizer"):
        plan_of(text)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert plan_of(text).runs[0].model == "other"


def test_a_recipe_that_the_bundle_will_refuse_is_warned_of_once(plan_of: PlanOf, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def configure(): ...\n")
    models = f"{{own: {{recipe: {own}}}, ours: {{recipe: {ROOT}/recipes/gpt_tiny.py}}}}"
    text = f"models: {models}\nsweep: {{grid: {{model: [own, ours], training.seed: [1, 2]}}}}\n"
    said = f"models.own.recipe: {own} lies outside of the clone, so `snakemake bundle` will refuse it: copy it"
    [(warning, runs)] = plan_of(text, corpora__text__tokenizer="bpe").warnings.items()
    assert warning == f"{said} into recipes/" and len(runs) == 2
    (tmp_path / "sizes.py").write_text("")
    own.write_text("import sizes\n\n\ndef configure(): ...\n")
    [warning] = plan_of(text, corpora__text__tokenizer="bpe").warnings
    assert warning == f"{said} and the modules that it imports into recipes/"
