"""transformers' model in fp32, layer by layer: the same numbers as of one that is held whole, in less memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import LATENT, MOE, TIED_BF16, specification, train_tokenizer

import megaboa
from megaboa import store
from megaboa.bridge import reference
from megaboa.bridge.source import obtain
from megaboa.errors import InputError

SCRIPTS = Path(megaboa.__file__).parents[1]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("config", [TIED_BF16, {**MOE, "dtype": "bfloat16"}, {**LATENT, "dtype": "bfloat16"}])
def test_layer_by_layer_is_the_same_to_the_last_bit(words, tmp_path, monkeypatch, config):
    source = obtain(specification(tmp_path, words, config=config))
    tokens = torch.randint(source.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model, how = reference.load(source.path, source.params)
        assert how == "held whole"
        whole = model(tokens).logits
        monkeypatch.setattr(reference, "HELD_WHOLE", source.params - 1)
        model, how = reference.load(source.path, source.params)
        assert how == "read layer by layer"
        widest = []
        for layer in model.model.layers:  # while one computes, the others have their own type
            layer.register_forward_pre_hook(lambda *_: widest.append(wide(model)))
        found = model(tokens).logits
    assert found.dtype == torch.float32 and torch.equal(found, whole)
    assert wide(model) == 0
    largest = max(sum(weight.numel() for weight in layer.parameters()) for layer in model.model.layers)
    assert 0 < max(widest) <= largest


LOADS = """
import sys
from pathlib import Path
from megaboa.bridge import reference
free, take = Path("free"), "take" in sys.argv
reference.free_bytes = lambda: float(free.read_text())
with reference.deciding(1_000) as whole:
    print("whole" if whole else "layer by layer", flush=True)
    if take:
        sys.stdin.readline()
        free.write_text("1000")
"""


def test_who_decides_while_another_loads_counts_what_that_one_takes(tmp_path):
    """4 kB are needed, and 10 kB are free until the first one has loaded."""
    (tmp_path / "free").write_text("10000")

    def start(*words):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", LOADS, *words]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)

    first = start("take")
    assert first.stdout.readline() == "whole\n"
    second = start()
    while not (said := second.stderr.readline()).startswith("waits for"):
        assert said, "it ended without waiting"
    assert said.startswith(f"waits for process {first.pid} on host ")
    first.communicate("\n")
    assert second.communicate()[0] == "layer by layer\n"


def test_nobody_else_can_lock_what_this_user_waits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(reference.tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"megaboa-{os.getuid()}"
    own.mkdir(mode=0o755)
    with (tmp_path / f"megaboa-reference-{os.getuid()}.lock").open("a+") as theirs:  # where an earlier version locked
        assert store.try_lock(theirs)
        with reference.deciding(1_000) as whole:
            assert whole and own.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_refused_and_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(reference.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir()
    own = tmp_path / f"megaboa-{os.getuid()}"
    own.symlink_to(tmp_path / "theirs")
    with pytest.raises(InputError, match=f"{own} on host .* belongs to another user: set TMPDIR"):
        reference.deciding(1_000).__enter__()


def wide(model):
    """Weights in fp32: all are in bfloat16 in the file."""
    return sum(weight.numel() for weight in model.parameters() if weight.dtype == torch.float32)


def test_a_model_that_would_fill_the_memory_is_not_held(monkeypatch):
    monkeypatch.setattr(reference, "free_bytes", lambda: 40e9)
    assert reference.fits(5_000_000_000) and not reference.fits(8_000_000_000)
    monkeypatch.setattr(reference, "free_bytes", lambda: 4e12)
    assert reference.fits(20_000_000_000) and not reference.fits(70_000_000_000)


def test_the_memory_of_a_job_is_that_of_its_group(tmp_path, monkeypatch):
    host = reference.free_bytes()
    assert host > 0
    group = tmp_path / reference.Path("/proc/self/cgroup").read_text().split("::", 1)[-1].split("\n")[0].lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(reference, "CGROUP", tmp_path)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert reference.free_bytes() == pytest.approx(host, rel=0.5)
    (group / "memory.max").write_text("5000\n")
    assert reference.free_bytes() == 4000


@pytest.mark.parametrize(
    ("layers", "hidden", "bound"), [(2, 64, 1e-5), (24, 256, 1e-5), (32, 4096, 4.3e-5), (80, 8192, 9.7e-5)]
)
def test_logits_of_large_models_may_differ_by_more(layers, hidden, bound):
    """Of the Llama of 8 B two H200s and the host differed by 1.5e-5."""
    assert reference.logits_bound(layers, hidden) == pytest.approx(bound, rel=0.02)
