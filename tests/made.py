"""Records as a real run leaves them, each with the keys that a test cares about."""

from __future__ import annotations

from typing import Any

from megaboa.records import Evaluation, ExportRecord, ImportRecord, ModelSource, TrainRecord


def source(**given: Any) -> ModelSource:
    facts = {"name": "m", "path": "hf", "digest": "1", "vocab_size": 300, "params": 1, "dtype": "float32"}
    return ModelSource(**{**facts, "device": "cpu", **given})


def imported(**given: Any) -> ImportRecord:
    facts = {"name": "m", "checkpoint": "store/m/megatron", "digest": "1", "source_digest": "1"}
    return ImportRecord(**{**facts, "tensors": 1, "params": 1, "dtype": "float32", "device": "cpu", **given})


def export(**given: Any) -> ExportRecord:
    facts = {"run": "a", "path": "store/exports/a", "checkpoint": "store/runs/a/iter_0000010", "iteration": 10}
    return ExportRecord(**{**facts, "file_bytes": 10**9, "digest": "1", "files": {}, **given})


def evaluation(**given: Any) -> Evaluation:
    facts = {"run": "a", "command": "true", "export": "1", "iteration": 10, "path": "store/evaluations/a"}
    return Evaluation(**{**facts, "values": {}, **given})


def trained(**given: Any) -> TrainRecord:
    facts = {"run": "a", "identity": "1", "store": "store", "iteration": 10, "train_iters": 10, "world_size": 1}
    return TrainRecord(**{**facts, **given})
