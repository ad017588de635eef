"""What runs share is specified once, by all that its job must know."""

import json
import os
from pathlib import Path

import made
import yaml
from indexed_files import write_indexed

from megaboa.config import load
from megaboa.files import file_digest, link, write_text
from megaboa.plan import make_plan, specifications
from megaboa.plan.shared import Shared
from megaboa.records import EvaluateSpec, write

EXPERIMENT = {
    "experiment": "e",
    "device": "cpu",
    "tokenizers": {"bpe": {"train_on": "text", "vocab_size": 300}},
    "corpora": {"text": {"source": "python-stdlib"}, "unused": {"source": "python-stdlib", "limit": 5}},
    "models": {
        "dense": {"tokenizer": "bpe", "init": "pretrained", "config": {"model_type": "qwen3", "hidden_size": 32}},
        "fresh": {"tokenizer": "bpe", "config": {"model_type": "qwen3", "hidden_size": 64}},
    },
    "data": {"blend": "text"},
    "training": {"train_iters": 4},
    "sweep": {"runs": {"a": {"model": "dense"}, "b": {"model": "fresh"}}},
    "export": {"runs": ["b"]},
}


def shared(tmp_path, **changes):
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
    return Shared(make_plan(load([path])), tmp_path / "results")


def test_only_what_is_used_is_made(tmp_path):
    found = shared(tmp_path)
    assert list(found.corpora) == ["text"]
    assert found.sourced_models == ["dense", "fresh"]
    assert found.imported_models == ["dense"]
    assert [path.split("/results/")[1] for path in found.import_proofs] == ["e/models/dense/proof.json"]
    assert [path.split("/results/")[1] for path in found.export_proofs] == ["e/runs/b/proof.json"]


def test_every_stage_before_the_report_is_asked_for_its_manifests(tmp_path):
    found = {path.split("/e/")[1] for path in shared(tmp_path).manifests}
    assert {"tokenizers/bpe.json", "data/text/sources.json", "data/text.json", "preflight.json"} <= found
    assert {"models/dense/source.json", "models/dense/import.json", "models/dense/proof.json"} <= found
    assert {"runs/a/train.json", "runs/b/train.json", "runs/b/export.json"} <= found
    assert "runs/a/export.json" not in found and "models/fresh/import.json" not in found
    link = tmp_path / "results" / "e" / "runs" / "a" / "attempts.jsonl"
    link.parent.mkdir(parents=True)
    link.symlink_to("gone")
    assert shared(tmp_path).manifests == [], "what is made again would train it again"


def test_a_run_waits_for_what_it_reads(tmp_path):
    found = shared(tmp_path)
    wanted = {run.name: [path.split("/e/")[1] for path in found.run_inputs(run)] for run in found.plan.runs}
    data = ["data/text.json", "data/text/verification.json"]
    assert wanted == {
        "a": [*data, "models/dense/source.json", "models/dense/import.json"],
        "b": [*data, "models/fresh/source.json"],
    }


def test_a_link_that_leads_to_an_older_model_makes_the_model_outdated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        write_text(f"{name}/config.json", "{}")
        for path in (f"{name}/config.json", name):
            os.utime(path, (10, 10))
    Path("export").symlink_to("one")
    os.utime("export", (10, 10), follow_symlinks=False)
    models = {
        "dense": {"tokenizer": "bpe", "init": "pretrained", "hf": "export"},
        "fresh": EXPERIMENT["models"]["fresh"],
    }
    found = shared(tmp_path, models=models)
    assert found.model_inputs("dense")[:2] == ["export/config.json", "export"]
    run = found.runs["a"]
    for path in (found.paths.tokenizer("bpe"), found.paths.corpus("text").manifest, found.paths.model("dense").source):
        write_text(path, "{}")
    assert not found.is_outdated(run)
    link("two", "export")
    assert found.is_outdated(run)


def test_runs_that_draw_the_same_samples_share_an_index(tmp_path):
    runs = {
        "a": {"optimizer.lr": 1.0},
        "b": {"optimizer.lr": 2.0, "model": "fresh", "data.max_epochs": 2.0},
        "wide": {"resources.gpus_per_node": 2, "training.micro_batch_size": 2, "data.eod_mask_loss": True},
        "long": {"training.seq_length": 4096},
        "seed": {"training.seed": 5},
        "split": {"data.split": "90,5,5"},
        "fim": {"data.fim.rate": 0.5},
        "sets": {"data.validation_sets": {"held-out": {"text": 1.0}}},
    }
    sweep = {"runs": {name: {"model": "dense", **values} for name, values in runs.items()}}
    found = shared(tmp_path, sweep=sweep, export={"runs": []})
    assert [[run.name for run in runs] for runs in found.indexes.values()] == [
        ["a", "b", "wide"],
        *[["fim"], ["long"], ["seed"], ["sets"], ["split"]],
    ]
    name = next(iter(found.indexes))
    spec = specifications.contents(found)[f"indexes/{name}.json"]
    assert (spec["run"], spec["max_epochs"]) == ("a", 2.0)
    inputs = [path.split("/results/")[1] for path in found.index_inputs(name)]
    assert inputs == ["e/data/text.json", "e/data/text/verification.json", "e/models/dense/source.json"]
    assert found.index_manifest(found.plan["wide"])[0].endswith(f"e/data/indexes/{name}.json")


def test_runs_without_corpora_have_no_index(tmp_path):
    recipe = tmp_path / "r.py"
    recipe.write_text("def configure(): ...\n")
    text = {"experiment": "e", "device": "cpu", "models": {"r": {"recipe": str(recipe)}}}
    path = tmp_path / "mock.yaml"
    path.write_text(yaml.safe_dump(text))
    found = Shared(make_plan(load([path])), tmp_path / "results")
    assert found.indexes == {}
    assert found.index_manifest(found.plan.runs[0]) == []


def test_weights_are_made_only_for_models_that_are_imported(tmp_path):
    specs = specifications.contents(shared(tmp_path))
    assert specs["models/dense.json"]["weights"] is True
    assert specs["models/fresh.json"]["weights"] is False


def test_a_changed_part_changes_its_own_specification_alone(tmp_path):
    before = specifications.contents(shared(tmp_path))
    corpora = {**EXPERIMENT["corpora"], "text": {"source": "python-stdlib", "append_eod": False}}
    after = specifications.contents(shared(tmp_path, corpora=corpora))
    assert [name for name in before if before[name] != after[name]] == ["corpora/text.json"]


def test_jobs_about_all_runs_see_in_one_file_that_a_run_has_changed(plan_of, tmp_path):
    def identities(rate):
        sweep = f"sweep: {{runs: {{one: {{}}, other: {{optimizer.lr: {rate}}}}}}}\n"
        return specifications.contents(Shared(plan_of(sweep), tmp_path))["runs.json"]["identities"]

    before, after = identities(1.0), identities(0.5)
    assert before["one"] == after["one"] and before["other"] != after["other"]


def test_specifications_are_written_only_when_they_change(tmp_path):
    found = shared(tmp_path)
    specifications.write(found)
    spec = found.folder / "specs" / "corpora" / "text.json"
    stamp = spec.stat().st_mtime_ns
    specifications.write(found)
    assert spec.stat().st_mtime_ns == stamp


def test_specifications_of_an_earlier_plan_stay_as_they_are_and_count_for_nothing(tmp_path):
    """Written again when the plan returns, they would seem to have changed."""
    two = {"text": {"source": "python-stdlib"}, "other": {"source": "python-stdlib", "limit": 9}}
    one, both = shared(tmp_path, corpora=two), shared(tmp_path, corpora=two, data={"blend": {"text": 1, "other": 1}})
    specs = one.paths.specs
    specifications.write(both)
    path, now = specs.of("corpora", "other"), specs.all("corpora")
    stamp = path.stat().st_mtime_ns
    assert path in now and not specs.unused.exists()
    (specs.path / "tensors.json").write_text("{}")
    specifications.write(one)
    assert specs.all("corpora") == [one for one in now if one != path] and not specs.tensors.exists()
    assert path in specs.unused_paths
    specifications.write(both)
    assert path.stat().st_mtime_ns == stamp and specs.all("corpora") == now and path not in specs.unused_paths


def test_a_corpus_is_made_by_its_shards_and_its_first_records_by_one(tmp_path):
    text = {"source": "python-stdlib", "shards": 3}
    found = shared(tmp_path, corpora={"text": text})
    assert [path.split("/e/data/")[1] for path in found.shard_manifests("text")] == [
        f"text/shard-{shard}-of-3.json" for shard in range(3)
    ]
    assert shared(tmp_path, corpora={"text": {**text, "limit": 9}}).shards("text") == 1


def test_the_number_of_shards_is_no_part_of_a_specification(tmp_path):
    text = {"source": "python-stdlib"}
    plans = [shared(tmp_path, corpora={"text": text | {"shards": number}}) for number in (1, 4)]
    one, other = map(specifications.contents, plans)
    assert one == other


def test_a_tokenizer_reads_its_text_as_the_corpus_does(tmp_path):
    text = {"source": "python-stdlib", "on_bad_record": "skip", "max_document_mb": 7}
    trained_on = specifications.contents(shared(tmp_path, corpora={"text": text}))["tokenizers/bpe.json"]["train_on"]
    assert (trained_on["on_bad_record"], trained_on["max_document_mb"]) == ("skip", 7)


def test_a_glob_may_name_saved_datasets(tmp_path):
    for name in ("one", "other"):
        folder = tmp_path / "saved" / name
        folder.mkdir(parents=True)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
        (folder / "data.arrow").touch()
    found = shared(tmp_path, corpora={"text": {"source": str(tmp_path / "saved" / "*")}})
    files = [path for path in found.corpus_inputs("text") if path.endswith(".arrow")]
    assert files == [str(tmp_path / "saved" / name / "data.arrow") for name in ("one", "other")]


def test_a_conversion_asks_for_memory_by_the_size_of_its_model(plan_of):
    shared = Shared(plan_of("models: {dense: {params: 1000000000}}\n"))
    name = shared.plan.runs[0].model
    assert shared.conversion_mb(name, copies=2) == 3000 + 8000
    assert shared.conversion_mb("of no run", copies=1) == 3000 + 32000


def test_existing_tokens_are_counted_and_not_tokenized(tmp_path):
    for name in ("a", "b"):
        write_indexed(tmp_path / name, [[1, 2], [3]])
    blend = f"0.3 {tmp_path}/a 0.7 {tmp_path}/b"
    (tmp_path / "blend.txt").write_text(blend)
    specs = []
    for named in (blend, str(tmp_path / "blend.txt")):
        found = shared(tmp_path, corpora={**EXPERIMENT["corpora"], "old": {"megatron": named}}, data={"blend": "old"})
        specs.append(specifications.contents(found)["corpora/old.json"])
        assert found.shard_manifests("old") == []
        files = [f"{tmp_path}/{name}.{ending}" for name in "ab" for ending in ("bin", "idx")]
        assert found.corpus_inputs("old") == [*files, *found.tokenizer_inputs(found.corpus_tokenizer("old"))]
    assert specs[0] == specs[1] and specs[0]["source"] == [f"{tmp_path}/a", f"{tmp_path}/b"]
    assert specs[0]["pairs"] == [{"prefix": f"{tmp_path}/{n}", "weight": w} for n, w in (("a", 0.3), ("b", 0.7))]


def test_a_tokenizer_of_gpt2s_files_has_their_size(tmp_path):
    files = {"vocab": str(tmp_path / "vocab.json"), "merges": str(tmp_path / "merges.txt")}
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    found = shared(tmp_path, tokenizers={"bpe": files})
    spec = specifications.contents(found)["tokenizers/bpe.json"]
    assert (spec["vocab"], spec["merges"], spec["vocab_size"]) == (*files.values(), 4)  # and <|endoftext|>
    assert found.tokenizer_texts("bpe") == list(files.values())
    assert found.runs["a"].facts.model.vocab_size == 4


def test_a_recipe_without_a_tokenizer_reads_existing_tokens(tmp_path):
    write_indexed(tmp_path / "a", [[1, 2], [3]])
    models = {"bridges": {"recipe": "vanilla_gpt_pretrain_config"}}
    changes = {"models": models, "sweep": {"runs": {"a": {}}}, "export": {}, "data": {"blend": "old"}}
    found = shared(tmp_path, corpora={"old": {"megatron": str(tmp_path / "a")}}, tokenizers={}, **changes)
    assert specifications.contents(found)["corpora/old.json"]["tokenizer"] is None
    assert found.corpus_inputs("old") == [f"{tmp_path}/a.bin", f"{tmp_path}/a.idx"]


def test_the_report_knows_what_runs_have_of_the_keys_that_only_others_set(plan_of, tmp_path):
    other = "{parallel.tp: 2, resources.gpus_per_node: 2, overrides.train.manual_gc_interval: 3}"
    sweep = f"sweep: {{runs: {{one: {{}}, other: {other}}}}}\n"
    report = specifications.contents(Shared(plan_of(sweep), tmp_path))["report.json"]
    keys = ("parallel.tp", "resources.gpus_per_node", "overrides.train.manual_gc_interval")
    assert report["values"] == {"one": {}, "other": dict(zip(keys, (2, 2, 3), strict=True))}
    assert report["unset"] == {"one": dict(zip(keys, (1, 1, None), strict=True))}
    left_out = "sweep: {skip_illegal: true, runs: {one: {}, other: {parallel.tp: 3, resources.gpus_per_node: 3}}}\n"
    left_out += "report: {figures: [{name: a, kind: bar, x: parallel.tp, y: mfu}]}\n"
    report = specifications.contents(Shared(plan_of(left_out), tmp_path))["report.json"]
    assert report["unset"] == {"one": {"parallel.tp": 1, "resources.gpus_per_node": 1}}
    recipe = "models: {m: {recipe: vanilla_gpt_pretrain_config, tokenizer: bpe}}\noptimizer: {lr: 0.1}\n"
    recipe += (
        "model: m\nsweep: {runs: {one: {}, other: {optimizer.lr: 0.2, parallel.tp: 2, resources.gpus_per_node: 2}}}\n"
    )
    report = specifications.contents(Shared(plan_of(recipe), tmp_path))["report.json"]
    known = {"optimizer.lr": 0.1, "parallel.tp": None, "resources.gpus_per_node": 1}
    assert report["unset"] == {"one": known}, "what a recipe decides isn't known"
    tuned = "{task: lora, tuning.rank: 4, tuning.loss_on: everything, data.blend: chat, tuning.template: none}"
    tuned = f"sweep: {{runs: {{one: {{}}, lora: {tuned}, sft: {tuned.replace('lora, tuning.rank: 4', 'sft')}}}}}\n"
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 20)
    tuned += f"corpora: {{old: {{source: {tmp_path}/chat.jsonl}}, "
    tuned = f"models: {{dense: {{init: pretrained}}}}\n{tuned}"
    tuned += f"chat: {{source: {tmp_path}/chat.jsonl, prompt: prompt, answer: answer}}}}\ndata: {{blend: old}}\n"
    unset = specifications.contents(Shared(plan_of(tuned), tmp_path))["report.json"]["unset"]
    assert (unset["one"]["tuning.rank"], unset["one"]["tuning.loss_on"]) == (None, None)
    assert unset["sft"] == {"tuning.rank": None}, "a run without adapters has no rank"
    grid = "sweep: {grid: {optimizer.lr: [0.1, 0.2]}}\n"
    assert "unset" not in specifications.contents(Shared(plan_of(grid), tmp_path))["report.json"]


def evaluated(tmp_path, **changes):
    command = "python score.py --known=results/made.json {model} {out}"
    return shared(tmp_path, evaluate={"command": command}, **changes)


def test_the_files_of_an_evaluations_command_are_in_its_specification(tmp_path, monkeypatch):
    """But not what other rules make."""
    monkeypatch.chdir(tmp_path)
    for name in ("score.py", "results/made.json"):
        write_text(name, name)
    found = evaluated(tmp_path, export={"runs": ["b"], "checkpoints": "all"})
    specs = specifications.contents(found)
    assert specs["evaluate.json"]["files"] == specs["along/b.json"]["files"] == {"score.py": file_digest("score.py")}


def test_evaluations_from_before_the_digests_stay_valid_until_a_script_is_edited(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text("score.py", "1")
    os.utime("score.py", (1, 1))
    now, first = {"score.py": file_digest("score.py")}, evaluated(tmp_path)
    command = first.plan.experiment.evaluate.command
    assert first.evaluation_files == now  # nothing was planned yet
    write(first.paths.specs.evaluate, EvaluateSpec(command=command))
    assert evaluated(tmp_path).evaluation_files == {}
    write(first.evaluations[0], made.evaluation(command=command))
    before = evaluated(tmp_path)
    assert before.evaluation_files == {} and "files" not in specifications.contents(before)["evaluate.json"]
    write(first.paths.specs.evaluate, EvaluateSpec(command="another {model} {out}"))
    assert evaluated(tmp_path).evaluation_files == now
    write(first.paths.specs.evaluate, EvaluateSpec(command=command))
    later = Path(first.evaluations[0]).stat().st_mtime + 1
    os.utime("score.py", (later, later))
    assert evaluated(tmp_path).evaluation_files == now


def test_evaluations_from_before_the_digests_are_as_old_as_the_newest(tmp_path, monkeypatch):
    """One call had evaluated the first run, then the script was edited, and the next call evaluated the second."""
    monkeypatch.chdir(tmp_path)
    write_text("score.py", "1")
    more = {"export": {"runs": ["a", "b"]}}
    first = evaluated(tmp_path, **more)
    command = first.plan.experiment.evaluate.command
    write(first.paths.specs.evaluate, EvaluateSpec(command=command))
    for path, seconds in zip(first.evaluations, (10, 30), strict=True):
        write(path, made.evaluation(command=command))
        os.utime(path, (seconds, seconds))
    os.utime("score.py", (20, 20))
    assert evaluated(tmp_path, **more).evaluation_files == {}
    os.utime("score.py", (40, 40))
    assert evaluated(tmp_path, **more).evaluation_files == {"score.py": file_digest("score.py")}


def test_files_that_evaluations_have_written_are_not_in_the_specification(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("score.py", "eval.log"):
        write_text(name, name)
    command = "python ./score.py --log eval.log {model} {out}"
    first = shared(tmp_path, evaluate={"command": command})
    assert first.evaluation_files.keys() == {"./score.py", "eval.log"}
    assert first.evaluation_inputs == ["score.py", "eval.log"], "Snakemake complains of ./"
    for known, wanted in ((command, {"./score.py"}), ("another", {"./score.py", "eval.log"})):
        write(first.evaluations[0], made.evaluation(command=known, written=("eval.log",)))
        assert shared(tmp_path, evaluate={"command": command}).evaluation_files.keys() == wanted
