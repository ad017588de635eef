"""Conversions by the real Bridge on the CPU, their proofs, and proofs that must fail."""

import os
import subprocess
import sys
from pathlib import Path

import made
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import DENSE, LATENT, MOE, TIED_BF16, specification, train_tokenizer

import megaboa
from megaboa.bridge.source import obtain
from megaboa.files import read_json, write_json
from megaboa.records import write

SCRIPTS = Path(megaboa.__file__).parents[1]
BF16 = {"dtype": "bfloat16"}
DYNAMIC = {**DENSE, "max_position_embeddings": 256, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
MODELS = {
    **{"dense": DENSE, "dynamic": DYNAMIC | BF16, "latent": LATENT | BF16, "moe": MOE | BF16},
    "tied-bf16": TIED_BF16,
}

pytestmark = pytest.mark.slow


def python(*words, cwd=None):
    return subprocess.run(
        [sys.executable, *map(str, words)],
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
        write(root / name / "source.json", obtain(spec))
    done = python(Path(__file__).with_name("convert_models.py"), root)
    assert done.returncode == 0, done.stderr
    return root


def states(checks):
    return {check["name"]: check["state"] for check in checks}


def of_logits(checks):
    """What is said of them, and the difference."""
    return next((check["detail"], check["difference"]) for check in checks if check["name"] == "logits")


@pytest.mark.parametrize("name", MODELS)
def test_an_import_loses_nothing(root, name):
    checks = read_json(root / name / "checks.json")
    names = ["vocabulary", "head", "Megatron parameters", "tensors", "round trip", "logits"]
    names += ["experts"] if name in ("latent", "moe") else []
    assert states(checks) == dict.fromkeys(names, "PASS"), checks
    count = len(load_file(Path(read_json(root / name / "source.json")["path"], "model.safetensors")))
    assert next(check["detail"] for check in checks if check["name"] == "tensors").startswith(f"{count} of {count}")
    assert "in fp32, transformers' model held whole; allowed" in of_logits(checks)[0]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dense"])
def test_an_import_that_no_host_could_hold_is_proved_by_the_same_logits_and_says_how(root, name):
    whole, large = (read_json(root / name / f"{kind}.json") for kind in ("checks", "large"))
    assert states(large) == states(whole) and set(states(large).values()) == {"PASS"}
    (said, difference), (expected, exactly) = of_logits(large), of_logits(whole)
    how = "transformers' model read layer by layer, Megatron's weights widened layer by layer"
    assert said == expected.replace("transformers' model held whole", how) != expected
    assert difference == exactly


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dense"])
def test_weights_that_are_in_fp32_only_while_they_are_needed_give_the_same_logits(root, name):
    found = read_json(root / name / "by_layers.json")
    assert found["same"] and found["left"] == found["narrow"] > 10


def test_a_parameter_that_bridge_does_not_know_is_named(root):
    """Bridge leaves it as made."""
    found = read_json(root / "unknown.json")
    assert found["state"] == "FAIL"
    assert found["detail"].endswith("without a source: decoder.layers.0.self_attention.linear_q_proj.layer_norm_weight")


def test_logits_are_compared_over_the_whole_length(root):
    """transformers stretches dynamic positions beyond the model's length, which 256 is; Megatron doesn't."""
    assert (
        "over 2 sequences of 64 tokens and one of 256 in fp32" in of_logits(read_json(root / "dynamic/checks.json"))[0]
    )
    found = read_json(root / "beyond.json")
    assert found["state"] == "FAIL" and "and one of 512 in fp32" in found["detail"]
    assert found["difference"] > 1e-3


WAITING = """#!/bin/sh
echo "a warning" >&2
echo "waits for process 42 on host n1, which loads a model" >&2
[ $3 = broken ] && echo "ValueError: no such model" >&2 && echo >&2 && exit 1
echo '{"missing": [], "unexpected": [], "mismatched": [], "finite": true, "generated": 2, "text": "a b"}'
"""


def test_a_proof_that_waits_says_for_whom(tmp_path):
    (tmp_path / "python").write_text(WAITING)
    (tmp_path / "python").chmod(0o755)
    code = "import sys; from megaboa.bridge import process; process.make_fit('cpu')\n"
    code += "from megaboa.bridge import proof; sys.executable = sys.argv[1]\n"
    code += "for folder in ('whole', 'broken'): print(*(one.detail for one in proof.runs_alone(folder, 10)), sep='; ')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "python"], capture_output=True, text=True)
    assert done.stderr.count("waits for process 42 on host n1, which loads a model\n") == 2
    assert "a warning" not in done.stderr
    whole, broken = done.stdout.splitlines()
    assert whole.endswith("all logits are finite; 2 tokens generated: 'a b'")
    assert broken == "transformers failed in a fresh process: ValueError: no such model"


def test_the_import_uses_the_store_again(root, tmp_path):
    arguments = ["--source", root / "dense" / "source.json", "--store", "store", "--device", "cpu"]
    first = python(SCRIPTS / "megaboa", "import-model", *arguments, "--out", "results/import.json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 1
    manifest = read_json(tmp_path / "results/import.json")
    source = read_json(root / "dense" / "source.json")
    assert (manifest["source_digest"], manifest["dtype"]) == (source["digest"], "float32")
    metadata = tmp_path / manifest["checkpoint"] / "iter_0000000" / ".metadata"
    written = metadata.stat().st_mtime_ns
    second = python(SCRIPTS / "megaboa", "import-model", *arguments, "--out", "results/again.json", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert read_json(tmp_path / "results/again.json") == manifest
    assert metadata.stat().st_mtime_ns == written


def test_a_checkpoint_of_other_weights_is_found_out(root, tmp_path):
    """The model has one bit of a tensor changed, one that the checkpoint lacks, and lacks one that it has."""
    source = read_json(root / "dense" / "source.json")
    forged = tmp_path / "forged"
    forged.mkdir()
    for path in Path(source["path"]).iterdir():
        (forged / path.name).write_bytes(path.read_bytes())
    weights = load_file(forged / "model.safetensors")
    weights["model.norm.weight"].view(torch.int32)[0] ^= 1
    weights["model.extra.weight"] = torch.ones(1)
    del weights["model.layers.1.input_layernorm.weight"]
    save_file(weights, forged / "model.safetensors", metadata={"format": "pt"})
    write_json(tmp_path / "source.json", {**source, "path": str(forged)})
    write(tmp_path / "import.json", made.imported(checkpoint=str(root / "dense" / "megatron")))
    done = python(
        *(SCRIPTS / "megaboa", "prove-import", "--source", tmp_path / "source.json"),
        *("--import", tmp_path / "import.json", "--out", tmp_path / "proof.json"),
    )
    assert done.returncode == 1
    assert "FAIL import of model dense: Megatron parameters: " in done.stdout
    assert "without a source: decoder.layers.1.input_layernorm.weight" in done.stdout
    assert "FAIL import of model dense: tensors: " in done.stdout
    assert "missing: model.extra.weight" in done.stdout
    assert "FAIL import of model dense: round trip: " in done.stdout
    assert "different: model.norm.weight" in done.stdout
    assert "checks failed: Megatron parameters, tensors, round trip" in done.stderr
    assert not (tmp_path / "proof.json").exists()
