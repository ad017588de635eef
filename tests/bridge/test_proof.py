"""Conversions by the real Bridge on the CPU, their proofs, and proofs that must fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import DENSE, MOE, TIED_BF16, specification, train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import megaboa
from megaboa.bridge.source import obtain
from megaboa.files import read_json, write_json

SCRIPTS = Path(megaboa.__file__).parents[1]
MODELS = {"dense": DENSE, "moe": MOE, "tied-bf16": TIED_BF16}

pytestmark = pytest.mark.slow


def python(script, *arguments, cwd=None):
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Every model imported; the dense one also changed and saved as a checkpoint, as training does it."""
    root = tmp_path_factory.mktemp("models")
    words = train_tokenizer(root / "tokenizer")
    for name, config in MODELS.items():
        spec = specification(root / "store", words, name=name, config=config)
        write_json(root / name / "source.json", obtain(spec))
    done = python(Path(__file__).with_name("convert_models.py"), root)
    assert done.returncode == 0, done.stderr
    return root


def states(checks):
    return {check["name"]: check["state"] for check in checks}


@pytest.mark.parametrize("name", MODELS)
def test_an_import_loses_nothing(root, name):
    checks = read_json(root / name / "checks.json")
    assert states(checks) == dict.fromkeys(["Megatron parameters", "tensors", "round trip", "logits"], "PASS"), checks
    count = len(load_file(Path(read_json(root / name / "source.json")["path"], "model.safetensors")))
    assert checks[1]["detail"].startswith(f"{count} of {count} tensors")


def test_the_import_script_uses_the_store_again(root, tmp_path):
    arguments = ["--source", root / "dense" / "source.json", "--store", "store", "--device", "cpu"]
    first = python(SCRIPTS / "import_model.py", *arguments, "--out", "results/import.json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 1
    manifest = read_json(tmp_path / "results/import.json")
    source = read_json(root / "dense" / "source.json")
    assert (manifest["source_digest"], manifest["dtype"]) == (source["digest"], "float32")
    metadata = tmp_path / manifest["checkpoint"] / "iter_0000000" / ".metadata"
    written = metadata.stat().st_mtime_ns
    second = python(SCRIPTS / "import_model.py", *arguments, "--out", "results/again.json", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert read_json(tmp_path / "results/again.json") == manifest
    assert metadata.stat().st_mtime_ns == written


def test_a_checkpoint_of_other_weights_is_found_out(root, tmp_path):
    """The model has one bit of one tensor changed, and a tensor that the checkpoint lacks."""
    source = read_json(root / "dense" / "source.json")
    forged = tmp_path / "forged"
    forged.mkdir()
    for path in Path(source["path"]).iterdir():
        (forged / path.name).write_bytes(path.read_bytes())
    weights = load_file(forged / "model.safetensors")
    weights["model.norm.weight"].view(torch.int32)[0] ^= 1
    weights["model.extra.weight"] = torch.ones(1)
    save_file(weights, forged / "model.safetensors", metadata={"format": "pt"})
    write_json(tmp_path / "source.json", {**source, "path": str(forged)})
    write_json(tmp_path / "import.json", {"checkpoint": str(root / "dense" / "megatron"), "device": "cpu"})
    done = python(
        *(SCRIPTS / "prove_import.py", "--source", tmp_path / "source.json", "--import", tmp_path / "import.json"),
        *("--out", tmp_path / "proof.json"),
    )
    assert done.returncode == 1
    assert "FAIL tensors" in done.stdout
    assert "missing: model.extra.weight" in done.stdout
    assert "FAIL round trip" in done.stdout
    assert "different: model.norm.weight" in done.stdout
    assert "checks failed: tensors, round trip" in done.stderr
    assert not (tmp_path / "proof.json").exists()


def test_a_trained_checkpoint_becomes_a_model_that_runs_alone(root, tmp_path):
    source = root / "dense" / "source.json"
    train = {
        "run": "r",
        "identity": "0" * 64,
        "store": "store/runs/x/r/000000000000",
        "iteration": 0,
        "checkpoint": str(root / "dense" / "trained" / "iter_0000000"),
    }
    write_json(tmp_path / "train.json", train)
    run = tmp_path / "results/x/runs/r"
    arguments = ["--train", "train.json", "--source", source, "--out", run / "export.json"]
    done = python(SCRIPTS / "export_model.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = read_json(run / "export.json")
    assert manifest["path"].startswith("store/exports/x/r/")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(manifest["files"])
    trained = AutoModelForCausalLM.from_pretrained(run / "export")
    first = AutoModelForCausalLM.from_pretrained(read_json(source)["path"])
    drift = (trained.model.norm.weight - first.model.norm.weight).std().item()
    assert 0.003 < drift < 0.03
    assert AutoTokenizer.from_pretrained(run / "export").decode([300 - 1])

    arguments = ["--export", run / "export.json", "--source", source, "--out", run / "proof.json"]
    done = python(SCRIPTS / "prove_export.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = read_json(run / "proof.json")["checks"]
    names = ["tensors", "trained", "loads", "finite", "generates", "logits"]
    assert states(checks) == dict.fromkeys(names, "PASS")

    # A NaN in one weight of the export: the proof must not hold.
    exported = tmp_path / manifest["path"]
    weights = load_file(exported / "model.safetensors")
    weights["lm_head.weight"][5, 5] = float("nan")
    del weights["model.norm.weight"]
    save_file(weights, exported / "model.safetensors", metadata={"format": "pt"})
    (run / "proof.json").unlink()
    done = python(SCRIPTS / "prove_export.py", *arguments, cwd=tmp_path)
    assert done.returncode == 1
    failed = {line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("FAIL")}
    assert failed == {"FAIL tensors", "FAIL loads", "FAIL finite", "FAIL logits"}
    assert not (run / "proof.json").exists()


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [(None, "run r saved no checkpoint to export; set checkpoint.save_interval"), ("gone/iter_0000003", "is gone")],
)
def test_a_run_without_its_checkpoint_is_not_exported(root, tmp_path, checkpoint, said):
    train = {"run": "r", "identity": "0", "store": "store/runs/x/r/0", "iteration": 3, "checkpoint": checkpoint}
    write_json(tmp_path / "train.json", train)
    done = python(
        *(SCRIPTS / "export_model.py", "--train", tmp_path / "train.json"),
        *("--source", root / "dense" / "source.json", "--out", tmp_path / "export.json"),
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "export.json").exists()
