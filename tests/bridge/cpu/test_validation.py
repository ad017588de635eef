"""Further validation sets and masks from the data, in Bridge's own pretrain() on the CPU."""

import itertools
import json
import math
import os
from pathlib import Path

import made
import numpy as np
import pytest
import tiny_training
from cpu_ranks import on_cpu
from indexed_files import write_indexed

from megaboa.files import read_json, read_jsonl
from megaboa.records import Corpus, RunSpec, parse, plain

pytestmark = pytest.mark.slow

LENGTH, VOCABULARY = 32, 127
SETS = {"near": {"text": 1.0}, "far": {"other": 1.0}, "both": {"other": 1.0, "third": 2.0}}
DATA = {"blend": {"text": 1.0}, "split": "80,10,10"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("validation")
    draw = np.random.default_rng(0)
    corpora = {}
    for name, low in (("text", 0), ("other", 60), ("third", 90)):
        documents = [[*draw.integers(low, low + 30, 20), VOCABULARY - 1] for _ in range(100)]
        dataset = made.dataset(prefix=str(root / name), tokens=write_indexed(root / name, documents))
        corpora[name] = plain(made.corpus(dataset))
    (root / "corpora.json").write_text(json.dumps(corpora))
    return root


def _held_out_samples(micro_batch_size: int, ranks: int, samples: int = 66, read: int = 16) -> list[int]:
    """The samples that an evaluation of 16 of them reads on all ranks, by Bridge's sampler."""
    from megatron.bridge.data.samplers import build_pretraining_data_loader

    found = []
    for rank in range(ranks):
        loader = build_pretraining_data_loader(
            list(range(samples)), 0, "cyclic", micro_batch_size, 0, True, data_parallel_rank=rank,
            data_parallel_size=ranks,
        )  # fmt: skip
        batches = itertools.islice(loader.batch_sampler, read // (micro_batch_size * ranks))
        found += [sample for batch in batches for sample in batch]
    return sorted(found)


def test_dp_and_the_micro_batch_decide_which_documents_an_evaluation_reads():
    """As the caption of the validation figure says: they may. Micro-batches of 1 and 2, which divide 66, read alike."""
    [one] = on_cpu(_held_out_samples, 1, 1)
    for micro_batch_size, ranks in ((1, 2), (4, 1), (4, 2)):
        [other] = on_cpu(_held_out_samples, micro_batch_size, ranks)
        assert len(one) == len(other) == 16 and one != other
    assert on_cpu(_held_out_samples, 2, 1) == [one]


def _pretrain(root: str, name: str, data: dict, model: dict) -> float:
    import torch
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from megaboa.bridge import datasets
    from megaboa.bridge.callbacks import StepWriter
    from megaboa.bridge.datasets import MaskFromData
    from megaboa.bridge.validation import ValidationSets

    class LookAcross(Callback):
        """How much a document's logits depend on the document before it."""

        difference = math.nan

        def on_train_end(self, context):
            if int(os.environ["WORLD_SIZE"]) > 1:
                return
            gpt, half = context.model[0].eval(), LENGTH // 2
            one = torch.arange(LENGTH)[None] % 30
            two = one.clone()
            two[:, :half] += 7
            document = torch.arange(LENGTH) // half
            mask = (document[:, None] != document[None, :]) | ~torch.ones(LENGTH, LENGTH).tril().bool()
            handed = mask[None, None] if data.get("reset_attention_mask") else None
            with torch.no_grad():
                logits = [gpt(tokens, torch.arange(LENGTH)[None], handed)[:, half:] for tokens in (one, two)]
            self.difference = float((logits[0] - logits[1]).abs().max())

    corpora = {name: parse(Corpus, found, root) for name, found in read_json(f"{root}/corpora.json").items()}
    learning_rate = model.pop("learning_rate", 1e-2)
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    cfg = tiny_training.configuration(f"{root}/{name}", {**dropout, **model}, {"save": None, "save_interval": None})
    cfg.optimizer.lr, cfg.optimizer.min_lr = learning_rate, learning_rate / 10
    cfg.train.train_iters = 5
    cfg.validation.eval_iters, cfg.validation.eval_interval = 2, 2
    datasets.configure(cfg, data, corpora)
    cfg.dataset.path_to_cache = f"{root}/cache"
    look = LookAcross()
    callbacks = [look]
    if data.get("reset_attention_mask"):
        callbacks.append(MaskFromData())
    if data.get("validation_sets"):
        callbacks.append(ValidationSets(RunSpec(data=data), corpora, forward_step))
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        callbacks.append(StepWriter(Path(root, f"{name}.jsonl")))
    pretrain(cfg, forward_step, callbacks=callbacks)
    return look.difference


def trained(folder, name, data, world_size=1, **model):
    """The curve with its last bits, the evaluations, and how far a document's logits depend on the one before it."""
    (folder / f"{name}.jsonl").unlink(missing_ok=True)
    across = on_cpu(_pretrain, str(folder), name, data, model, world_size=world_size)[-1]
    events = read_jsonl(folder / f"{name}.jsonl")
    curve = [
        (event["step"], event["loss"].hex(), event["grad_norm"].hex()) for event in events if event["event"] == "step"
    ]
    return curve, [(event["step"], event["losses"]) for event in events if event["event"] == "eval"], across


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ({}, 1),
        ({}, 2),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
        ({"pipeline_model_parallel_size": 2}, 2),
        ({"context_parallel_size": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}, 2),
    ],
    ids=["dp1", "dp2", "tp2", "pp2", "cp2"],
)
def test_further_sets_are_evaluated_and_change_nothing_else(folder, layout, world_size):
    alone, evaluated, _ = trained(folder, "alone", DATA, world_size, **layout)
    curve, further, _ = trained(folder, "with-sets", {**DATA, "validation_sets": SETS}, world_size, **layout)
    assert len(curve) == 5 and curve == alone
    assert [step for step, _ in further] == [step for step, _ in evaluated] == [2, 4, 5]
    for (_, main), (_, losses) in zip(evaluated, further, strict=True):
        assert losses.keys() == {"lm loss", "valid/near", "valid/far", "valid/both"}
        assert losses["lm loss"] == main["lm loss"]
        assert all(map(math.isfinite, losses.values()))
    last = further[-1][1]
    assert last["valid/near"] < last["valid/far"], "what is trained on is easier than what never was"


def test_a_set_is_evaluated_on_the_same_samples_every_time(folder):
    """Without learning, the loss stays what it is."""
    _, evaluated, _ = trained(folder, "still", {**DATA, "validation_sets": SETS}, learning_rate=0.0)
    assert len({losses["valid/far"] for _, losses in evaluated}) == 1


def test_with_the_mask_of_the_data_a_document_does_not_see_the_one_before_it(folder):
    masked = {**DATA, "reset_attention_mask": True}
    *_, across = trained(folder, "open", DATA)
    curve, _, across_masked = trained(folder, "masked", masked)
    assert across > 1e-3
    assert across_masked == 0.0
    assert curve != trained(folder, "open", DATA)[0]
