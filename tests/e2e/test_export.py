"""Out of Megatron, and proof of it: for real, and with faults in what was written.

Of a run that started from imported weights (experiment `hf`), and of one from scratch (`fresh`).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clone import user_environment
from transformers import AutoTokenizer

from megaboa.files import read_json, read_jsonl, write_json
from megaboa.run import checkpoints

pytestmark = pytest.mark.slow

EXPERIMENT = """\
experiment: hf
device: cpu
tokenizers: {bpe: {train_on: text, vocab_size: 384}}
corpora: {text: {source: python-stdlib, limit: 60}}
models:
  moe:
    tokenizer: bpe
    init: pretrained
    config: {model_type: qwen3_moe, hidden_size: 32, intermediate_size: 64, moe_intermediate_size: 16, num_experts: 4,
      num_experts_per_tok: 2, norm_topk_prob: true, decoder_sparse_step: 1, num_hidden_layers: 2,
      num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128,
      vocab_size: 500, tie_word_embeddings: false} # more than the tokenizer has, as most of the hub's models
data: {split: "90,5,5"}
training: {train_iters: 6, global_batch_size: 8, micro_batch_size: 2, seq_length: 64, precision: fp32, eval_interval: 2}
optimizer: {lr: 3.0e-3}
checkpoint: {save_interval: 2}
sweep:
  runs:
    dp2: {resources.gpus_per_node: 2}
export: {runs: [dp2], file_gb: 0.0001, license: apache-2.0}
generate: {prompts: [import, "def f("], tokens: 8}
"""
FRESH = EXPERIMENT.replace("experiment: hf", "experiment: fresh").replace("init: pretrained", "init: scratch")
BOTH = ("hf", "fresh")
PROVED = {
    *("files", "tensors", "trained", "experts", "vocabulary", "head", "loads", "finite", "generates"),
    *("Megatron parameters", "second export", "read back", "logits", "validation loss"),
}
# What must be among the failed checks.
FAULTS = {
    "one bit flipped": {"files"},
    "a file cut off": {"files"},
    "a file deleted": {"files"},
    "one bit flipped early": {"second export", "read back"},
    "two tensors of one shape swapped early": {"second export", "read back", "logits", "validation loss"},
    "an expert dropped early": {"tensors", "experts", "loads"},
    "a NaN early": {"finite", "second export", "read back", "logits"},
}


@pytest.fixture(scope="module")
def done(workspace):
    for name, text in (("hf", EXPERIMENT), ("fresh", FRESH)):
        (workspace.path / f"{name}.yaml").write_text(text)
        workspace.snakemake("export", "generate", "--configfile", f"{name}.yaml")
    return workspace


@pytest.fixture(scope="module", params=BOTH)
def faults(done, tmp_path_factory, request):
    out = tmp_path_factory.mktemp("faults") / "found.json"
    script = Path(__file__).with_name("exports_with_faults.py")
    arguments = [f"results/{request.param}/runs/dp2", f"results/{request.param}/models/moe/source.json", out]
    environment = {**os.environ, "PYTHONPATH": str(done.path / "workflow/scripts")}
    subprocess.run([sys.executable, script, *arguments], cwd=done.path, env=environment, check=True)
    return read_json(out)


@pytest.mark.parametrize("experiment", BOTH)
def test_everything_is_proved(done, experiment):
    proof = done.json(experiment, "runs", "dp2", "proof.json")
    assert proof["left_out"] == {}
    assert {check["name"]: check["state"] for check in proof["checks"]} == dict.fromkeys(PROVED, "PASS")


def test_the_folder_is_what_the_hub_expects(done):
    export = done.results("hf", "runs", "dp2", "export")
    names = {path.name for path in export.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors.index.json"} <= names
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    card = (export / "README.md").read_text()
    for said in (
        'license: "apache-2.0"',
        "weights of iteration 6 of 6",
        "2 rank(s)",
        "tokens seen | 3,072",
        "| text |",
    ):
        assert said in card
    assert AutoTokenizer.from_pretrained(export).decode([300])


def test_a_clean_copy_passes(faults):
    assert faults["nothing"]["failed"] == [] and faults["nothing"]["passed"].keys() == PROVED
    assert "in fp32, transformers' model held whole; allowed" in faults["nothing"]["passed"]["logits"][0]


def test_a_copy_that_no_host_could_hold_is_proved_by_the_same_numbers_and_says_how(faults):
    whole, large = faults["nothing"], faults["nothing, and too large to be held"]
    assert (large["failed"], large["left_out"]) == ([], {})
    (expected, _), (said, _) = whole["passed"]["logits"], large["passed"]["logits"]
    how = "transformers' model read layer by layer, Megatron's weights widened layer by layer"
    assert said == expected.replace("transformers' model held whole", how) != expected
    assert numbers(large) == numbers(whole), "differences of logits and loss are the same to the last bit"


def numbers(found):
    """What passed, without words on how logits were computed, and what a fresh process generated in another type."""
    passed = found["passed"] | {"logits": found["passed"]["logits"][1]}
    return {name: seen for name, seen in passed.items() if name != "generates"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(faults, fault):
    assert FAULTS[fault] <= set(faults[fault]["failed"])


def test_a_file_that_was_never_whole_is_named(faults):
    assert "is damaged" in faults["a file cut off early"]["error"]


@pytest.mark.parametrize("experiment", BOTH)
def test_both_models_say_the_same(done, experiment):
    found = done.json(experiment, "runs", "dp2", "generations.json")
    assert found["iteration"] == 6
    assert [one["prompt"] for one in found["generations"]] == ["import", "def f("]
    assert all(one["same"] and one["megatron"] for one in found["generations"])


def folders(workspace):
    """Exports, and what is half-written."""
    return sorted(path.name for path in workspace.path.glob("store/exports/hf/dp2/*") if path.is_dir())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_is_one_sentence_and_leaves_no_export(done, ranks):
    """The system refuses to write more than 50 kB to a file. Once there is room, the same call makes it."""
    spec = {"run": "dp2", "checkpoint": 4, "file_gb": 5.0, "license": None}
    write_json(done.path / "spec.json", spec)
    before = folders(done)
    call = (
        "export-model --spec spec.json --source results/hf/models/moe/source.json --out results/hf/runs/dp2/full.json"
    )
    conversion = read_json(done.results("hf", "specs", "conversions", "moe.json"))
    write_json(done.path / "ranks.json", conversion | {"layout": {"tp": ranks, "pp": 1, "ep": 1}})
    words = (
        f"{sys.executable} workflow/scripts/convert.py --spec ranks.json --logs ranks workflow/scripts/megaboa {call}"
    )

    def export(limit):
        return subprocess.run(
            ["bash", "-c", f"ulimit -f {limit}; exec {words}"],
            cwd=done.path,
            env={**user_environment(), "MEGABOA_ZYGOTE": "0"},
            capture_output=True,
            text=True,
        )

    ended = export(50)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.splitlines() == [
        "error: store/exports/hf/dp2: files may not be that large here (`ulimit -f`); no partial file was kept. "
        "Free some space, or set `store` to another place"
    ]
    manifest = done.results("hf", "runs", "dp2", "full.json")
    assert not manifest.exists()
    assert folders(done) == before
    ended = export("unlimited")
    assert ended.returncode == 0, ended.stderr
    made = Path(read_json(manifest)["path"])
    assert folders(done) == sorted([*before, made.name])
    manifest.unlink()
    shutil.rmtree(done.path / made)


def test_a_damaged_export_loses_its_proof(done):
    """Last but two, as it changes the store: the proof is asked for again, and not given."""
    export = Path(done.json("hf", "runs", "dp2", "export.json")["path"])
    path = done.path / export / "config.json"
    before = path.read_bytes()
    path.write_bytes(before + b" ")
    output = done.snakemake("export", "--configfile", "hf.yaml", "--forcerun", "prove_export", code=1)
    assert "FAIL export of run dp2: files: " in output
    assert "changed or missing: config.json" in output
    assert not done.results("hf", "runs", "dp2", "proof.json").exists()
    path.write_bytes(before)


def test_the_best_and_any_kept_checkpoint(done):
    store = done.store("hf", "dp2")
    for wanted, iteration in (("best", None), ("2", 2)):
        text = EXPERIMENT.replace("export: {", f"export: {{checkpoint: {wanted}, ")
        (done.path / "hf.yaml").write_text(text)
        assert done.planned("export", "--configfile", "hf.yaml") == {"export": 1, "export_model": 1, "prove_export": 1}
        done.snakemake("export", "--configfile", "hf.yaml")
        export = done.json("hf", "runs", "dp2", "export.json")
        evaluated = [event for event in read_lines(store) if event["event"] == "eval"]
        losses = {event["step"]: event["losses"]["lm loss"] for event in evaluated if event["step"] in (2, 4, 6)}
        best = min(losses, key=losses.get)
        assert export["iteration"] == (iteration or best)
        chosen_from = {"loss": losses[best], "evaluated": 3, "kept": 3}
        assert export.get("best") == (None if iteration else chosen_from)


def test_a_damaged_checkpoint_is_not_exported(done):
    iteration = 4
    folder = done.store("hf", "dp2") / "checkpoints" / f"iter_{iteration:07d}"
    text = EXPERIMENT.replace("export: {", f"export: {{checkpoint: {iteration}, ")
    (done.path / "hf.yaml").write_text(text)
    assert (folder / checkpoints.DIGESTS).exists(), "every kept checkpoint has checksums"
    part = next(folder.glob("*.distcp"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    output = done.snakemake("export", "--configfile", "hf.yaml", code=1)
    assert f"checkpoint {iteration} is damaged: " in output
    assert "has changed since it was written; nothing is exported" in output


def read_lines(store):
    return [event for path in sorted(store.glob("attempts/*/steps.jsonl")) for event in read_jsonl(path)]
