"""What `megaboa documents` says of a step is what ranks have read in it, in Bridge's own pretrain()."""

import made
import pytest
from cpu_ranks import on_cpu
from indexed_files import write_indexed

from megaboa.data import batches
from megaboa.files import write_json
from megaboa.paths import RunFolder
from megaboa.records import DataIndex, write

pytestmark = pytest.mark.slow

LENGTH, STEPS, BATCH, MICRO = 16, 4, 8, 2


def _read(root: str, prefixes: list[str], weights: list[float] | None) -> list[tuple[str, list[int], int]]:
    """What this rank reads for training: dataset, documents and tokens of every sample, in its order."""
    import torch
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split

    found, query = [], GPTDataset._query_document_sample_shuffle_indices

    def noted(self, number):
        text, documents, lengths = query(self, number)
        if self.index_split == Split.train:
            found.append((self.dataset_path, documents.tolist(), text.tolist()[:-1]))
        return text, documents, lengths

    GPTDataset._query_document_sample_shuffle_indices = noted
    sizes = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 128}
    config = _pretrain_common()
    config.model = GPTModelProvider(
        **sizes, seq_length=LENGTH, params_dtype=torch.float32, bf16=False, make_vocab_size_divisible_by=64
    )
    config.mixed_precision = None
    config.optimizer.bf16 = config.optimizer.fp16 = False
    config.optimizer.params_dtype = torch.float32
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 0, STEPS
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = STEPS, BATCH, MICRO
    config.validation.eval_iters = 0
    config.dataset.seq_length, config.dataset.num_workers = LENGTH, 0
    config.dataset.blend, config.dataset.split = (prefixes, weights), "90,5,5"
    config.dataset.path_to_cache = f"{root}/cache"
    config.tokenizer.tokenizer_type, config.tokenizer.vocab_size = "NullTokenizer", 127
    config.logger.tensorboard_dir = None
    config.dist.distributed_backend, config.dist.use_gloo_process_groups = "gloo", False
    config.checkpoint.save = config.checkpoint.load = None
    pretrain(config, forward_step)
    return found


def run_of(root, names, prefixes):
    """A run's folder as the plan and the index's job leave it."""
    folder = root / "results" / "e" / "runs" / "r"
    data = {"blend": dict.fromkeys(names, 1.0), "split": "90,5,5"}
    training = {"global_batch_size": BATCH, "micro_batch_size": MICRO, "train_iters": STEPS}
    model = {"name": "m", "init": "scratch", "recipe": None}
    write_json(folder / "run.json", {"data": data, "model": model, "training": training, "world_size": 2})
    write_json(folder / "launch.json", {"index": "abc"})
    for name, prefix in zip(names, prefixes, strict=True):
        write(root / "results" / "e" / "data" / f"{name}.json", made.corpus(made.dataset(prefix=prefix), name=name))
    index = DataIndex(name="abc", cache=f"{root}/cache", samples={}, corpora=(), max_epochs=4.0)
    write(root / "results" / "e" / "data" / "indexes" / "abc.json", index)
    return RunFolder(folder)


@pytest.mark.parametrize("names", [("one", "two"), ("one",)])
def test_every_rank_reads_what_is_said(tmp_path, names):
    documents = {"one": [[7] * (5 + 3 * n) for n in range(40)], "two": [list(range(n % 30 + 1)) for n in range(90)]}
    prefixes = [f"{tmp_path}/{name}" for name in names]
    for name in names:
        write_indexed(tmp_path / name, documents[name])
    weights = [0.4, 0.6] if len(names) > 1 else None
    ranks = on_cpu(_read, str(tmp_path), prefixes, weights, world_size=2)
    folder = run_of(tmp_path, names, prefixes)
    per_step = BATCH // 2
    for rank, read in enumerate(ranks):
        assert len(read) >= STEPS * per_step
        for step in range(1, STEPS + 1):
            batch = batches.of_step(folder, step, rank)
            assert len(batch.samples) == per_step and {sample.copy for sample in batch.samples} == {rank}
            for sample, (path, numbers, text) in zip(
                batch.samples, read[(step - 1) * per_step : step * per_step], strict=True
            ):
                assert {piece.dataset for piece in sample.pieces} == {path}
                said = [piece.document for piece in sample.pieces]
                # One more may give the last label only.
                assert said == numbers[: len(said)] and len(numbers) - len(said) <= 1
                name = path.rpartition("/")[2]
                tokens = [t for p in sample.pieces for t in documents[name][p.document][p.begin : p.begin + p.tokens]]
                assert tokens == text
    whole = batches.of_step(folder, STEPS)
    assert [sample.copy for sample in whole.samples] == [0, 0, 1, 1] * 2
    assert sum(whole.corpora.values()) == BATCH * LENGTH
