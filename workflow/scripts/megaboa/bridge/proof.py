"""Proofs that a conversion lost nothing: every tensor by name, shape, type and bits, and the same logits.

A proof is a list of checks, each PASS or FAIL with what was seen. The CPU backend, where it is needed, must be active
before this module is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.core.utils import unwrap_model
from transformers import AutoModelForCausalLM

from megaboa.bridge.compare import listed, round_trip, same_kinds, trained
from megaboa.bridge.convert import bridge_of, load_checkpoint, single_process
from megaboa.bridge.tensors import Tensors
from megaboa.bridge.verdict import Check, check

# Largest difference of two logits in fp32, in units of the largest logit (or of 1, where all are smaller).
LOGITS_BOUND = 1e-5
PROBE_SEQUENCES, PROBE_TOKENS = 2, 64


def prove_import(source: dict[str, Any], checkpoint: Path) -> list[Check]:
    """The Megatron checkpoint holds the Hugging Face model, the whole of it and nothing else."""
    bridge = bridge_of(source)
    with single_process(), Tensors(source["path"]) as originals:
        model = load_checkpoint(bridge, checkpoint)
        return [
            mapped(bridge, model),
            *round_trip(originals, bridge.export_hf_weights(model, cpu=True, show_progress=False)),
            same_logits(model, source["path"]),
        ]


def prove_export(export: dict[str, Any], source: dict[str, Any]) -> list[Check]:
    """The exported folder is a complete model that transformers loads and runs, and holds the trained weights."""
    checks = []
    with Tensors(source["path"]) as before, Tensors(export["path"]) as after:
        if len(before):  # a model that was trained from scratch may have no weights to compare with
            checks += [same_kinds(before.kinds(), after.kinds()), trained(before, after)]
    checks += runs_alone(export["path"])
    with single_process():
        model = load_checkpoint(bridge_of(source), Path(export["checkpoint"]))
        checks.append(same_logits(model, export["path"]))
    return checks


def mapped(bridge: AutoBridge, model: list[torch.nn.Module]) -> Check:
    """Every parameter of the Megatron model has its counterpart: none kept a random start unnoticed."""
    covered = {task.param_name for task in bridge.get_conversion_tasks(model) if task and task.param_weight is not None}
    names = [name for name, _ in unwrap_model(model)[0].named_parameters()]
    left = [name for name in names if name not in covered]
    detail = f"{len(names) - len(left)} of {len(names)} come from tensors of the model"
    return check("Megatron parameters", not left, detail + listed("without a source", left))


def same_logits(model: list[torch.nn.Module], folder: str) -> Check:
    """Megatron's model and transformers' give the same logits in fp32 for the same tokens."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    megatron = unwrap_model(model)[0].float().eval()
    device = next(megatron.parameters()).device
    vocab_size = reference.config.get_text_config().vocab_size
    tokens = torch.randint(vocab_size, (PROBE_SEQUENCES, PROBE_TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(PROBE_TOKENS).expand_as(tokens)
    with torch.no_grad():
        expected = reference(tokens).logits
        found = megatron(tokens.to(device), positions.to(device), None).cpu()[..., :vocab_size]
    scale = max(1.0, expected.abs().max().item())
    difference = (found - expected).abs().max().item() / scale
    detail = f"largest difference {difference:.1e} of the largest logit, over {tokens.numel()} tokens in fp32"
    # A NaN compares false, so it fails.
    return check("logits", difference <= LOGITS_BOUND, f"{detail}; allowed {LOGITS_BOUND:.0e}")


def runs_alone(folder: str) -> list[Check]:
    """A fresh process, with no network and no Megatron, loads the model and generates."""
    scripts = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "megaboa.bridge.reload", folder],
        env={**os.environ, "PYTHONPATH": str(scripts), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [check("loads", False, f"transformers failed in a fresh process: {last[0]}")]
    seen = json.loads(done.stdout)
    wrong = seen["missing"] + seen["unexpected"] + seen["mismatched"]
    return [
        check("loads", not wrong, "transformers loads it offline in a fresh process" + listed("not clean", wrong)),
        check("finite", seen["finite"], "all logits are finite" if seen["finite"] else "logits hold NaN or infinity"),
        check("generates", seen["generated"] > 0, f"{seen['generated']} tokens generated: {seen['text']!r}"),
    ]
