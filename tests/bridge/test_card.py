"""The model card says what the run was, and YAML can read its head."""

from dataclasses import replace
from pathlib import Path

import made
import pytest
import yaml

from megaboa.bridge.card import card, origin
from megaboa.files import link, write_json, write_text
from megaboa.paths import RunFolder
from megaboa.records import DataIndex, Evaluated, Examples, ExamplesRead, Origin, ShownExample, write

RUN = {
    "model": {"name": "m", "init": "pretrained", "hf": "owner/base", "revision": None},
    "data": {"blend": {"wiki": 1.0}, "split": "98,1,1"},
    "training": {"global_batch_size": 8, "seq_length": 64, "precision": "bf16_mixed", "seed": 7},
    "optimizer": {"name": "adam", "lr": 3e-4},
    "parallel": {"tp": 2, "pp": 1, "cp": 1, "ep": 1, "fsdp": "none"},
    "world_size": 4,
}


def card_of(tmp_path, run=RUN, **changes):
    folder = tmp_path / "results" / "paper" / "runs" / "large"
    write_json(folder / "run.json", run)
    datasets = (made.dataset(documents=1000, tokens=123456), made.dataset(documents=2, tokens=4))
    write(tmp_path / "results" / "paper" / "data" / "wiki.json", made.corpus(*datasets, digest="abcdef" * 8))
    values = {
        "source": made.source(params=1234567, revision="abc123"),
        "iteration": 50,
        "evaluation": Evaluated(step=50, losses={"lm loss": 2.71828}),
        "train": made.trained(identity="f" * 64, train_iters=100),
        "license": "apache-2.0",
        "commit": "c0ffee",
        "versions": {"torch": "2.13.0"},
    }
    return card(RunFolder(folder), **{**values, **changes})


def test_its_head_is_what_the_hub_reads(tmp_path):
    head = yaml.safe_load(card_of(tmp_path).split("---")[1])
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megatron-bridge", "megaboa"],
        "license": "apache-2.0",
        "base_model": "owner/base",
    }


def test_it_says_what_was_trained_on_what_and_how(tmp_path):
    text = card_of(tmp_path)
    for said in (
        *("# paper: large", "weights of iteration 50 of 100", "| parameters | 1,234,567 |"),
        *(
            "| started from | owner/base at abc123 |",
            "| tokens seen | 25,600 |",
            "| layout | 4 rank(s), tp 2 |",
            "| validation loss | 2.7183 |",
        ),
        *(
            "| wiki | 1 of the blend, about 25,600 tokens read; 1,002 documents, 123,460 tokens, digest abcdefabcdef |",
            "| commit | c0ffee |",
        ),
    ):
        assert said in text


def test_what_is_not_known_is_not_said(tmp_path):
    text = card_of(tmp_path, license=None, evaluation=None, commit=None)
    assert "license" not in text
    assert "validation loss" not in text
    assert "| commit | unknown |" in text


def test_of_fine_tuning_it_says_which_tokens_counted_and_where_the_adapters_are(tmp_path):
    tuning = {
        "template": "{{ x }}",
        "loss_on": "answers",
        "pack": False,
        "rank": 8,
        "alpha": 16,
        "targets": ["linear_qkv"],
    }
    text = card_of(tmp_path, run={**RUN, "task": "lora", "tuning": tuning})
    for said in (
        *("Fine-tuned by low-rank adapters (LoRA) with Megatron-Bridge", "| loss on | answers |"),
        *("| chat template | chat_template.jinja |", "| rank | 8 |", "| adapted layers | linear_qkv |"),
        "| adapters alone | `adapter/`; here they are merged |",
    ):
        assert said in text
    assert "Pretrained" not in text and "Fine-tuning" not in card_of(tmp_path)


def tuned_on(tmp_path, experiment, name, parent=None, known=True):
    """A run that is fine-tuned on 100 examples in sequences of 64 tokens, half of which is padding."""
    folder = RunFolder(tmp_path / "results" / experiment / "runs" / name)
    tuning = {"template": "none", "loss_on": "answers", "pack": False}
    more = {"parent": parent} if parent else {}
    write_json(folder.file("run"), {**RUN, "task": "sft", "tuning": tuning, "data": {"blend": {"qa": 1.0}}, **more})
    write_json(folder.file("launch"), {"index": "abc"})
    corpus = made.corpus(made.dataset(documents=120, tokens=4000), digest="e" * 40)
    examples = Examples(kind="pairs", count=120, turns=120, size=1, sha256="f" * 64)
    write(tmp_path / "results" / experiment / "data" / "qa.json", replace(corpus, examples=examples))
    shown = ShownExample(corpus="qa", tokens=2, pieces=(("a", False), ("b", True)))
    numbers = {"examples": 100, "tokens": 3200, "counted": 900, "longest": 60, "cut": 0, "silent": 0, "positions": 6400}
    read = ExamplesRead(**numbers, template="none", shown=shown)
    index = DataIndex(name="abc", cache="c", samples={"train": 100}, corpora=(), max_epochs=4.0, examples=read)
    path = tmp_path / "results" / experiment / "data" / "indexes" / "abc.json"
    if known:
        write(path, index)
    else:
        path.unlink(missing_ok=True)
    return folder


def test_tokens_of_examples_are_counted_without_padding(tmp_path):
    def of(folder, iteration):
        return card(folder, made.source(), iteration, None, made.trained(train_iters=50), None, None, {})

    write_json(tmp_path / "results/old/runs/base/run.json", {**RUN, "training": {**RUN["training"], "seq_length": 32}})
    load = {"optimizer": False, "rng": False}
    base = {"experiment": "old", "run": "base", "iteration": 10, "load": load, "weights_only": True}
    first = tuned_on(tmp_path, "paper", "first", base)
    text, before = of(first, 50), 10 * 8 * 32
    positions = before + 50 * 8 * 64
    assert f"| tokens seen | about {before + 4 * 3200:,} without padding, in {positions:,} positions |" in text
    read = "1 of the blend, about 12,800 tokens read: 4 times its 100 examples for training"
    assert f"| qa | {read}; 120 examples, digest eeeeee" in text
    assert f"about {before + 2 * 3200:,} without" in of(first, 25), "of a checkpoint before the last"
    second = {"experiment": "paper", "run": "first", "iteration": 50, "load": load, "weights_only": True}
    second = tuned_on(tmp_path, "paper", "second", second)
    assert f"| tokens seen | about {before + 8 * 3200:,} without padding" in of(second, 50), "its parent's, too"
    lost = tuned_on(tmp_path, "paper", "first", base, known=False)
    text = of(lost, 50)
    assert f"| tokens seen | {before + 50 * 8 * 64:,}, padding included |" in text
    assert "| qa | 1 of the blend; 120 examples, digest eeeeeeeeeeee |" in text


def test_weights_of_an_inline_config_are_called_random(tmp_path):
    model = {"name": "m", "init": "pretrained", "config": {"model_type": "qwen3"}, "seed": 3}
    text = card_of(tmp_path, run={**RUN, "model": model}, source=made.source())
    assert "| started from | random weights, drawn from seed 3 |" in text and "base_model" not in text
    text = card_of(tmp_path, source=made.source())
    assert "| started from | the weights in the local folder base, digest 1 |" in text


def test_the_same_run_gives_the_same_card(tmp_path):
    assert card_of(tmp_path) == card_of(tmp_path)


@pytest.mark.parametrize(("license", "taken"), [(None, "other"), ("mit", "mit")])
def test_a_local_base_gives_its_licence_and_its_own_base(tmp_path, license, taken):
    head = {"license": "other", "license_name": "llama", "license_link": "LICENSE", "base_model": "meta/llama"}
    write_text(tmp_path / "there" / "README.md", f"---\n{yaml.safe_dump({**head, 'tags': ['a']})}---\n\n# Llama\n")
    source = made.source(path="moved", folder=str(tmp_path / "there"))
    found = yaml.safe_load(card_of(tmp_path, source=source, license=license).split("---")[1])
    own = {"license_name": "llama", "license_link": "LICENSE"} if license is None else {}
    assert {key: found.get(key) for key in (*head, "tags")} == {
        **dict.fromkeys(head),
        **{"license": taken, "base_model": "meta/llama", "tags": ["megatron-bridge", "megaboa"], **own},
    }
    scratch = {**RUN, "model": {**RUN["model"], "init": "scratch"}}
    assert "llama" not in card_of(tmp_path, run=scratch, source=source, license=license)
    for text in ("# no head", "---\n: [\n---\n", "---\n- a\n---\n"):
        write_text(tmp_path / "there" / "README.md", text)
        assert "base_model" not in card_of(tmp_path, source=source, license=license)


def test_a_base_that_is_an_export_is_named_by_its_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, folder = RunFolder(tmp_path / "results" / "old" / "runs" / "small"), tmp_path / "store/exports/old/small/abc"
    write_text(folder / "README.md", "# old: small\n")
    link(folder, run.path / "export")
    export = made.export(path="store/exports/old/small/abc", checkpoint="store/runs/old/small/1/checkpoints/iter_10")
    write(run.export, replace(export, digest="e" * 64))
    assert origin(run.path / "export") == Origin(
        experiment="old", run="small", iteration=10, export="e" * 64, tokens=None
    ), "its store is gone"
    write_json(run.file("run"), RUN)
    write_json(tmp_path / "store/runs/old/small/1/identity.json", {"run": RUN})
    found = origin(Path("results/old/runs/small/export"))
    assert found.tokens == "5,120"
    text = card_of(tmp_path, source=made.source(origin=found))
    assert "| started from | iteration 10 of old: small, export eeeeeeeeeeee |" in text
    assert "| tokens seen before | 5,120 |" in text and "base_model" not in text
    assert origin(folder) is None
    write(run.export, replace(export, path="store/exports/old/small/other"))
    assert origin(run.path / "export") is None, "the manifest is of another export"


def test_a_path_of_this_machine_is_not_published(tmp_path):
    text = card_of(tmp_path, source=made.source())
    assert "owner/base" not in text and "base_model" not in text


def test_a_child_has_seen_its_parents_tokens_too(tmp_path):
    folder = tmp_path / "results" / "old" / "runs" / "small"
    write_json(folder / "run.json", {**RUN, "training": {**RUN["training"], "global_batch_size": 4}})
    card_of(tmp_path)
    child = RunFolder(tmp_path / "results" / "paper" / "runs" / "large")
    write_json(
        child.path / "run.json",
        {
            **RUN,
            "parent": {"experiment": "old", "run": "small", "iteration": 10, "load": {"optimizer": True, "rng": True}},
        },
    )
    text = card(child, made.source(), 20, None, made.trained(train_iters=20), None, None, {})
    assert f"| tokens seen | {(10 * 4 + 10 * 8) * 64:,} |" in text
    assert "| started from | iteration 10 of old: small |" in text
    read = f"| wiki | 1 of the blend, about {10 * 4 * 64:,} tokens read; "
    assert f"## Data of old/small@10\n\n| | |\n|---|---|\n{read}the corpus has changed since, or is gone |" in text


def test_data_of_parents_and_of_their_parents_is_named(tmp_path):
    def parent(experiment, corpus, digest, **more):
        folder = tmp_path / "results" / experiment
        write_json(folder / "runs/r/run.json", {**RUN, "data": {"blend": {corpus: 1.0}, "split": "98,1,1"}, **more})
        write(folder / f"data/{corpus}.json", made.corpus(made.dataset(documents=3, tokens=99), digest="d" * 40))
        store = tmp_path / "store" / experiment
        write_json(store / "identity.json", {"run": {}, "corpora": {corpus: digest}})
        write(folder / "runs/r/train.json", made.trained(store=str(store)))
        load = {"optimizer": True, "rng": True}
        return {"parent": {"experiment": experiment, "run": "r", "iteration": 10, "load": load}}

    first = parent("first", "web", "d" * 40)
    second = parent("second", "code", "another", **{"parent": {**first["parent"], "iteration": 4}})
    text = card_of(tmp_path, run={**RUN, **second}, iteration=50)
    one, two = text.split("## Made")[0].split("## Data of ")[1:]
    assert f"| tokens seen | {50 * 8 * 64:,} |" in text
    assert one.startswith("second/r@10\n") and f"code | 1 of the blend, about {6 * 8 * 64:,} tokens read; the" in one
    assert (
        two.startswith("first/r@4\n") and f"about {4 * 8 * 64:,} tokens read; 3 documents, 99 tokens, digest d" in two
    )


def test_weights_and_tokens_read_of_each_corpus_and_which_was_only_evaluated(tmp_path):
    for name in ("code", "held", "late"):
        corpus = made.corpus(made.dataset(documents=10, tokens=500), digest=name * 8)
        write(tmp_path / f"results/paper/data/{name}.json", corpus)
    card_of(tmp_path)
    folder = RunFolder(tmp_path / "results" / "paper" / "runs" / "large")

    def rows(**data):
        write_json(folder.path / "run.json", {**RUN, "data": {"split": "98,1,1", **data}})
        text = card(
            RunFolder(folder.path), made.source(), 50, None, made.trained(train_iters=50),
            None, None, {},
        )  # fmt: skip
        cells = [
            line.split(" | ") for line in text.split("## Data")[1].split("## Made")[0].splitlines() if "; " in line
        ]
        return {cell[0].strip("| "): cell[1].split(";")[0] for cell in cells}

    assert rows(blend={"wiki": 3.0, "code": 1.0}, validation_sets={"far": {"held": 1.0}}) == {
        "wiki": "0.75 of the blend, about 19,200 tokens read",
        "code": "0.25 of the blend, about 6,400 tokens read",
        "held": "not trained on, evaluated",
    }
    assert rows(blend_per_split={"train": {"code": 1.0}, "valid": {"wiki": 1.0}, "test": {"late": 2.0}}) == {
        "code": "1 of the blend, about 25,600 tokens read",
        "wiki": "not trained on, evaluated",
        "late": "not trained on, evaluated",
    }


def test_of_a_corpus_that_parents_trained_on_it_says_what_was_evaluated(tmp_path):
    def rows(held_out, digest):
        store, old = tmp_path / "store", tmp_path / "results" / "old"
        write_json(store / "identity.json", {"run": {}, "corpora": {"web": digest, "far": "f" * 40}})
        write_json(old / "runs/r/run.json", {**RUN, "data": {"blend": {"web": 1.0}, "split": "90,10,0"}})
        write(old / "runs/r/train.json", made.trained(store=str(store)))
        for name in ("web", "far"):
            corpus = made.corpus(made.dataset(documents=3, tokens=99), digest=name[0] * 40)
            write(tmp_path / f"results/paper/data/{name}.json", corpus)
        parent = {"experiment": "old", "run": "r", "iteration": 10, "load": {"optimizer": True, "rng": True}}
        sets = {"web": {"web": 1.0}, "far": {"far": 1.0}}
        run = {**RUN, "data": {**RUN["data"], "validation_sets": sets}, "parent": {**parent, "held_out": held_out}}
        data = card_of(tmp_path, run=run).split("## Data\n")[1].split("## Data of")[0]
        cells = [line.strip("| ").split(" | ") for line in data.splitlines() if "; 3 documents" in line]
        return {name: use.split("; 3")[0] for name, use in cells}

    share = "evaluated on the share for validation of split 90,10,0; parents trained on that for training"
    assert rows({"web": "90,10,0"}, "w" * 40)["web"] == share
    assert rows({}, "w" * 40)["web"] == "evaluated in whole; old/r@10 trained on it", "of runs of older versions"
    assert rows({}, "other")["web"] == "not trained on, evaluated"
    assert rows({}, "w" * 40)["far"] == "not trained on, evaluated"


def test_what_a_recipe_chose_is_read_from_the_checkpoint(tmp_path):
    saved = {
        "model": {"seq_length": 32, "tensor_model_parallel_size": 2, "bf16": True},
        **{"dataset": {"seq_length": 32, "random_seed": 5}, "train": {"global_batch_size": 4}},
        **{"rng": {"seed": 5}, "optimizer": {"optimizer": "adam", "lr": 1e-3}, "mixed_precision": {"bf16": True}},
    }
    write_json(tmp_path / "iter_0000050" / "run_config.yaml", saved)
    folder = tmp_path / "results" / "paper" / "runs" / "large"
    train = made.trained(identity="f" * 64, train_iters=100, checkpoint=str(tmp_path / "iter_0000050"))
    write(folder / "train.json", train)
    recipe = {**RUN["model"], "recipe": "llama32_1b_pretrain_config", "args": {}}
    text = card_of(tmp_path, run={**RUN, "model": recipe, "training": {"seed": 7}, "optimizer": {}, "parallel": {}})
    for said in (
        "| tokens seen | 6,400 |",
        "| sequence length | 32 |",
        "| global batch | 4 sequences |",
        "| seed | 7 |",
    ):
        assert said in text
    for said in ("| precision | bf16_mixed |", "peak learning rate 0.001", "| layout | 4 rank(s), tp 2 |"):
        assert said in text
