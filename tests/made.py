"""Records as a real run leaves them, each with the keys that a test cares about."""

from __future__ import annotations

from typing import Any

from megaboa.records import (
    BadRecords,
    Compared,
    Corpus,
    CorpusSpec,
    Dataset,
    Evaluation,
    ExportRecord,
    ImageOrder,
    ImageSpec,
    ImageStart,
    ImportRecord,
    ModelSource,
    ModelSpec,
    TrainRecord,
)


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


def dataset(**given: Any) -> Dataset:
    facts = {"key": "text", "documents": 1, "tokens": 1, "bytes_per_token": 1.0, "largest_token": 0, "dropped": {}}
    return Dataset(**{**facts, "sizes": {}, "sha256": {}, "lengths": (), "frequent": (), **given})


def corpus(*datasets: Dataset, **given: Any) -> Corpus:
    """With the sums of its datasets."""
    documents, tokens = (sum(getattr(one, key) for one in datasets) for key in ("documents", "tokens"))
    facts = {"name": "c", "datasets": datasets, "documents": documents, "tokens": tokens, "dtype": "uint16"}
    facts |= {"bad": BadRecords(), "encoders": (), "refused": None, "compared": Compared(documents=0, characters=0)}
    facts |= {"digest": "1", "source": "c.jsonl", "sources": (), "tokenizer": "t", "tokenizer_digest": "1"}
    return Corpus(**{**facts, "identity": {}, **given})


def trained(**given: Any) -> TrainRecord:
    facts = {"run": "a", "identity": "1", "store": "store", "iteration": 10, "train_iters": 10, "world_size": 1}
    return TrainRecord(**{**facts, **given})


def model_spec(**given):
    facts = {"name": "m", "store": "store", "hf": None, "revision": None, "config": None, "seed": 0, "tokenizer": None}
    return ModelSpec(**{**facts, "weights": True, "device": "cpu", **given})


def corpus_spec(**given):
    text = {"name": "text", "source": [], "text_key": "text", "separator": None, "subset": None, "split": "train"}
    text |= {"revision": None, "limit": None, "max_document_mb": 128, "on_bad_record": "error", "store": "store"}
    text |= {"tokenizer": {}, "min_characters": 0, "deduplicate": False, "append_eod": True, "prepend_bos": None}
    return CorpusSpec(**{**text, "encoder": "auto", **given})


def image_spec(**given):
    facts = {"runtime": "pyxis", "device": "cpu", "suffix": ".sqsh", "name": "i", "path": None, "build": None}
    return ImageSpec(**{**facts, "bridge_source": None, **given})


def image_start(**given):
    return ImageStart(**{"runtime": "pyxis", "store": "store", "python": "python3", **given})


def image_order(**given):
    return ImageOrder(**{**vars(image_spec()), **vars(image_start()), **given})
