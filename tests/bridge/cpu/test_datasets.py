"""What the keys of a run's data section do to the samples that Bridge's own datasets give, and to attention."""

import json
from dataclasses import replace
from types import SimpleNamespace

import made
import numpy as np
import pytest
from cpu_ranks import on_cpu
from indexed_files import write_indexed

from megaboa.data import tokenizer
from megaboa.files import digest, read_json, write_json
from megaboa.paths import RunFolder
from megaboa.records import Corpus, FrozenTokenizer, Load, Parent, RunSpec, Sources, parse, plain
from megaboa.records import write as write_record

pytestmark = pytest.mark.slow

LENGTH = 32
FIM_TOKENS = {"prefix": "<|fim_prefix|>", "middle": "<|fim_middle|>", "suffix": "<|fim_suffix|>", "pad": "<|fim_pad|>"}
FIM = {"rate": 1.0, "spm_rate": 0.0, "split_sample": None, "fragment_rate": None, "no_prefix": None}
FIM["tokens"] = {**FIM_TOKENS, "eod": tokenizer.END_OF_TEXT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two corpora of short documents; `odd` has two datasets."""
    root = tmp_path_factory.mktemp("datasets")
    texts = [f"value {number} is {number * number}\n" for number in range(120)]
    tokenizer.train(texts, 300, root / "tokenizer")
    words = tokenizer.load(tokenizer.find(root / "tokenizer"))
    words.add_tokens(list(FIM_TOKENS.values()))
    words.save_pretrained(str(root / "tokenizer"))
    corpora = {"even": [texts[::2]], "odd": [texts[1:60:2], texts[61::2]]}
    manifests = {
        name: plain(made.corpus(*(write(root / f"{name}-{i}", words, part) for i, part in enumerate(parts))))
        for name, parts in corpora.items()
    }
    (root / "corpora.json").write_text(json.dumps(manifests))
    return root


def write(prefix, words, texts):
    documents = [[*words(text)["input_ids"], words.eos_token_id] for text in texts]
    return made.dataset(prefix=str(prefix), documents=len(documents), tokens=write_indexed(prefix, documents))


def read_corpora(folder):
    return {name: parse(Corpus, found, folder) for name, found in read_json(f"{folder}/corpora.json").items()}


def _parent(held_out):
    load = Load(optimizer=True, rng=True)
    return Parent(experiment="old", run="base", iteration=1, load=load, held_out=held_out)


def _samples(folder, data, count, held_out):
    """The training set's first samples, as lists, and the sizes of all sets."""
    import torch
    from megatron.bridge.data.loaders import build_train_valid_test_datasets
    from megatron.bridge.data.utils import get_dataset_provider
    from megatron.bridge.recipes.common import _pretrain_common

    from megaboa.bridge import datasets

    config = _pretrain_common()
    config.model = SimpleNamespace(context_parallel_size=1)
    config.tokenizer.tokenizer_model = f"{folder}/tokenizer"
    config.dataset.seq_length = LENGTH
    config.train.train_iters, config.train.global_batch_size = 5, 4
    config.validation.eval_iters = 2
    corpora = read_corpora(folder)
    datasets.configure(config, data, corpora)
    config.dataset.path_to_cache = f"{folder}/cache-{digest(data)[:8]}"
    datasets.set_tokenizer(config)
    config.dataset.finalize()
    found = build_train_valid_test_datasets(config, get_dataset_provider(config.dataset))
    sets = datasets.build_validation_sets(config, RunSpec(data=data, parent=_parent(held_out)), corpora)

    def plain(sample):
        return {name: part.tolist() if torch.is_tensor(part) else part for name, part in sample.items()}

    first = [plain(found[0][index]) for index in range(count)]
    again = [plain(found[0][index]) for index in reversed(range(count))]
    documents = {}
    for name, dataset in sets.items():
        parts = getattr(dataset, "datasets", [dataset])
        documents[name] = {part.dataset_path.rpartition("/")[2]: part.indices.tolist() for part in parts}
    sizes = [None if dataset is None else len(dataset) for dataset in found]
    return {
        "first": first,
        "same": again[::-1] == first,
        "sizes": sizes,
        "sets": {name: len(dataset) for name, dataset in sets.items()},
        "documents": documents,
        "eod": config.dataset.tokenizer.eod,
    }


def samples(folder, data, count=6, held_out=None):
    return on_cpu(_samples, str(folder), data, count, held_out or {})[0]


def _training_set(folder, data, corpora):
    """The training set of a blend, and Bridge's configuration."""
    from megatron.bridge.data.loaders import build_train_valid_test_datasets
    from megatron.bridge.data.utils import get_dataset_provider

    config = _config(folder, data, corpora)
    return build_train_valid_test_datasets(config, get_dataset_provider(config.dataset))[0], config


def _config(folder, data, corpora):
    """Bridge's configuration of a run with this data."""
    from megatron.bridge.recipes.common import _pretrain_common

    from megaboa.bridge import datasets

    config = _pretrain_common()
    config.model = SimpleNamespace(vocab_size=None)
    config.tokenizer.tokenizer_model = f"{folder}/tokenizer"
    config.dataset.seq_length, config.train.train_iters, config.train.global_batch_size = LENGTH, 5, 4
    datasets.configure(config, data, corpora)
    config.dataset.path_to_cache = f"{folder}/cache-index"
    datasets.set_tokenizer(config)
    config.dataset.finalize()
    return config


def _index(folder, largest_token, start=0):
    """What the index job finds about the training set of a blend."""
    from megaboa.bridge import index

    corpora = read_corpora(folder)
    parts = tuple(replace(part, largest_token=largest_token) for part in corpora["odd"].datasets)
    corpora["odd"] = replace(corpora["odd"], datasets=parts)
    data = {"blend": {"even": 1.0, "odd": 3.0}, "split": "80,10,10"}
    train, config = _training_set(folder, data, corpora)
    index.require_vocabulary(config, {"odd": corpora["odd"]})
    return index.epochs(data["blend"], corpora, train, config, start)


def _shared_and_weighted(folder):
    """What the index job finds where two corpora have a dataset in common, and one has weights."""
    from megaboa.bridge import index

    odd, even = read_corpora(folder)["odd"], read_corpora(folder)["even"]
    weighted = tuple(replace(part, weight=weight) for part, weight in zip(odd.datasets, (9.0, 1.0), strict=True))
    corpora = {"odd": replace(odd, datasets=weighted), "first": replace(odd, datasets=odd.datasets[:1]), "even": even}
    data = {"blend": {"odd": 2.0, "first": 1.0, "even": 1.0}, "split": "80,10,10"}
    rows = index.epochs(data["blend"], corpora, *_training_set(folder, data, corpora))
    return rows, index.warnings(rows, 0.0)


def _evaluations(folder, data, iters):
    """What the index job finds, and says, about evaluations. `weighted` has the datasets of `odd`, with weights."""
    from megatron.bridge.data.loaders import build_train_valid_test_datasets
    from megatron.bridge.data.utils import get_dataset_provider

    from megaboa.bridge import datasets, index

    corpora = read_corpora(folder)
    parts = tuple(
        replace(part, weight=weight) for part, weight in zip(corpora["odd"].datasets, (9.0, 1.0), strict=True)
    )
    corpora["weighted"] = replace(corpora["odd"], datasets=parts)
    config = _config(folder, data, corpora)
    config.validation.eval_iters = iters
    splits = build_train_valid_test_datasets(config, get_dataset_provider(config.dataset))
    sets = datasets.build_validation_sets(config, RunSpec(data=data), corpora)
    found = {"valid": splits[1], **{f"valid/{name}": dataset for name, dataset in sets.items()}}
    rows = list(index.evaluations(data, corpora, found, config))
    return rows, list(index.repeated(rows))


def _warnings(rows, limit):
    from megaboa.bridge import index

    return [index.warnings(rows, limit, resumes) for resumes in (False, True)]


def test_the_index_counts_the_tokens_of_every_corpus(folder):
    even, odd = on_cpu(_index, str(folder), 303)[0]
    manifests = read_corpora(folder)
    assert (even.weight, odd.weight) == (0.25, 0.75)
    assert even.tokens_asked + odd.tokens_asked == 20 * LENGTH
    assert even.tokens_asked == pytest.approx(5 * LENGTH, abs=LENGTH)
    for row in (even, odd):
        there = manifests[row.name].tokens
        assert row.tokens == pytest.approx(0.8 * there, rel=0.05)
        assert row.epochs == row.tokens_asked / row.tokens


def test_the_index_counts_the_samples_of_a_parent_apart(folder):
    whole, rest = (on_cpu(_index, str(folder), 303, start)[0] for start in (0, 2))
    assert sum(row.tokens_before for row in rest) == 2 * 4 * LENGTH
    for one, other in zip(whole, rest, strict=True):
        assert one.tokens_before == 0
        assert other.tokens_before + other.tokens_asked == one.tokens_asked
    limit = whole[0].epochs * 0.99
    alone, with_parent = on_cpu(_warnings, rest[:1], limit)[0]
    assert alone == []
    assert f"is read {whole[0].epochs:.3g} times by the run and its parents" in with_parent[0]


def test_the_index_counts_datasets_by_corpus_and_weighted_ones_one_by_one(folder):
    rows, said = on_cpu(_shared_and_weighted, str(folder))[0]
    first, second = (f"{folder}/odd-{number}" for number in (0, 1))
    assert [(row.name, row.prefix) for row in rows] == [
        ("odd", ""), ("odd", first), ("odd", second), ("first", ""), ("even", "")
    ]  # fmt: skip
    assert [row.weight for row in rows] == pytest.approx([0.5, 0.45, 0.05, 0.25, 0.25])
    whole, *parts = rows[:3]
    assert sum(row.tokens_asked for row in rows if not row.prefix) == 20 * LENGTH
    assert (whole.tokens_asked, whole.tokens) == tuple(
        sum(getattr(row, name) for row in parts) for name in ("tokens_asked", "tokens")
    )
    for row in rows:
        assert row.tokens_asked == pytest.approx(row.weight * 20 * LENGTH, abs=1.5 * LENGTH)
        assert row.epochs == row.tokens_asked / row.tokens
    assert [text.partition(" is read ")[0] for text in said] == [
        f"corpora.odd.megatron: {first}", f"corpora.odd.megatron: {second}", "corpus 'first'", "corpus 'even'"
    ][: len(said)]  # fmt: skip
    assert len(said) == 4 or (len(said) == 3 and parts[1].tokens_asked == 0)


def remedy(most):
    if most:
        return f"set eval_iters to at most {most}, or validate on more text"
    return "one batch is more than it has: validate on more text, or take smaller batches"


def test_the_index_knows_what_evaluations_repeat(folder):
    data = {"blend": {"odd": 1.0}, "split": "80,10,10", "validation_sets": {"far": {"even": 1.0}}}
    rows, said = on_cpu(_evaluations, str(folder), data, 3)[0]
    far, main = rows
    assert (main.key, far.key) == ("data.split", "data.validation_sets.far")
    assert (main.corpus, far.corpus) == ("odd", "even") and {row.asked for row in rows} == {3 * 4 * LENGTH}
    manifests = read_corpora(folder)
    assert far.there == manifests["even"].tokens and main.there == pytest.approx(0.1 * manifests["odd"].tokens, rel=0.2)
    assert [row.most for row in rows] == [row.there // (4 * LENGTH) for row in rows]
    assert far.most >= 3 > main.most >= 0
    assert said == [
        f"data.split: corpus 'odd' has {main.there} tokens for validation, and each evaluation reads 384 "
        f"(training.eval_iters: 3), so it repeats some: {remedy(main.most)}"
    ]
    far, main = on_cpu(_evaluations, str(folder), data, far.most)[0][0]
    assert far.asked <= far.there
    _, said = on_cpu(_evaluations, str(folder), data, far.most + 1)[0]
    assert len(said) == 2 and said[0].endswith(remedy(far.most))
    assert on_cpu(_evaluations, str(folder), data, 0)[0] == ([], [])


def test_of_a_blend_the_corpus_or_prefix_counts_that_evaluations_repeat_first(folder):
    sets = {"validation_sets": {"mixed": {"even": 1.0, "weighted": 9.0}, "same": {"even": 9.0, "weighted": 1.0}}}
    data = {"blend_per_split": {"train": {"odd": 1.0}, "valid": {"odd": 1.0}, "test": None}, **sets}
    rows, said = on_cpu(_evaluations, str(folder), data, 20)[0]
    mixed, same, main = rows
    first = read_corpora(folder)["odd"].datasets[0]
    assert (mixed.corpus, mixed.prefix, mixed.there) == ("weighted", first.prefix, first.tokens)
    assert mixed.asked == pytest.approx(0.81 * 20 * 4 * LENGTH, abs=1)
    assert mixed.most == int(first.tokens / (0.81 * 4 * LENGTH))
    assert (same.corpus, same.prefix, same.asked) == ("even", "", round(0.9 * 20 * 4 * LENGTH))
    assert (main.key, main.corpus, main.prefix) == ("data.blend_per_split.valid", "odd", "")
    assert f"data.validation_sets.mixed: corpora.weighted.megatron: {first.prefix} has" in said[0]


def test_ids_mean_the_same_tokens_in_all_corpora_and_in_the_model(tmp_path):
    """Checked here, because a tokenizer of the hub isn't there when the run is planned."""

    def words(name, *tokens):
        vocab = {token: number for number, token in enumerate(tokens)}
        write_json(tmp_path / name / "tokenizer.json", {"model": {"vocab": vocab}, "added_tokens": []})
        return tmp_path / name

    model, more, other = words("model", "a", "b"), words("more", "a", "b", "c"), words("other", "b", "a")
    run = tmp_path / "results" / "e" / "runs" / "r"
    write_json(run / "run.json", {"data": {"blend": {"one": 1, "two": 1}}, "model": {"name": "m", "init": "scratch"}})
    folder = RunFolder(run)

    def check(one, two, has_source=True):
        files = {"one": one, "two": two}
        for name, place in files.items():
            found = place and FrozenTokenizer(
                path=str(place), digest=place.name, file=f"{place}/tokenizer.json", size=2, eos=None, bos=None
            )
            listed = Sources(name=name, files=(), tokenizer=found, identity={}, folder="store")
            write_record(folder.experiment_folder.corpus(name).sources, listed)
            write_record(folder.experiment_folder.corpus(name).manifest, made.corpus(name=name))
        source = made.source(tokenizer=str(model) if has_source else None, tokenizer_digest="model")
        write_record(folder.experiment_folder.model("m").source, source)
        on_cpu(_one_tokenizer, run)

    check(model, more)
    check(more, None)  # pairs whose tokenizer isn't known
    with pytest.raises(
        AssertionError, match=r"run r: corpora\.two\.tokenizer: .*other has another vocabulary than .*mod"
    ):
        check(model, other)
    with pytest.raises(
        AssertionError, match=r"run r: corpora\.one\.tokenizer: .*more has .* than .*other of corpora\.two"
    ):
        check(more, other, has_source=False)


def _one_tokenizer(folder):
    from megaboa.bridge import index

    index.require_one_tokenizer(RunFolder(folder))


def test_a_token_beyond_the_vocabulary_is_refused_before_training(folder):
    with pytest.raises(
        AssertionError, match=r"corpora\.odd: .*odd-0\.bin holds token 304, and the model's vocabulary is 304"
    ):
        on_cpu(_index, str(folder), 304)


def test_without_options_documents_run_into_each_other(folder):
    for sample in samples(folder, {"blend": {"even": 1.0}, "split": "80,10,10"})["first"]:
        assert sample["position_ids"] == list(range(LENGTH))
        assert set(sample["loss_mask"]) == {1.0}
        assert "attention_mask" not in sample or sample["attention_mask"] is not None


def test_positions_attention_and_loss_stop_at_the_end_of_a_document(folder):
    options = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    found = samples(folder, {"blend": {"even": 1.0}, "split": "80,10,10", **options})
    ends = 0
    for sample in found["first"]:
        tokens = np.array(sample["tokens"])
        # Which document of the sample a token is in; the token that ends one belongs to it.
        document = np.concatenate([[0], np.cumsum(tokens == found["eod"])[:-1]])
        starts = [np.flatnonzero(document == number)[0] for number in document]
        assert sample["position_ids"] == (np.arange(LENGTH) - starts).tolist()
        assert sample["loss_mask"] == (tokens != found["eod"]).astype(float).tolist()
        seen = ~np.array(sample["attention_mask"])[0]
        blocks = document[:, None] == document[None, :]
        assert (seen == blocks & np.tri(LENGTH, dtype=bool)).all()
        ends += len(set(document)) - 1
    assert ends > 6


def test_fill_in_the_middle_rearranges_documents_and_the_same_way_each_time(folder):
    found = samples(folder, {"blend": {"even": 1.0}, "split": "80,10,10", "fim": FIM})
    words = tokenizer.load(tokenizer.find(folder / "tokenizer"))
    prefix, middle, suffix = (words.convert_tokens_to_ids(FIM_TOKENS[part]) for part in ("prefix", "middle", "suffix"))
    for sample in found["first"]:
        parts = [token for token in sample["tokens"] if token in (prefix, middle, suffix, found["eod"])]
        assert parts[:3] == [prefix, suffix, middle]
    assert found["same"], "a sample depends on those that were read before it"


def test_a_token_that_the_tokenizer_does_not_have_is_named(folder):
    tokens = {**FIM["tokens"], "middle": "<middle>"}
    with pytest.raises(AssertionError, match=r"data\.fim\.tokens\.middle: the tokenizer has no token '<middle>'"):
        samples(folder, {"blend": {"even": 1.0}, "split": "80,10,10", "fim": {**FIM, "tokens": tokens}})


def test_blends_per_split_and_validation_sets(folder):
    data = {"blend_per_split": {"train": {"even": 1.0, "odd": 3.0}, "valid": {"odd": 1.0}, "test": None}}
    found = samples(folder, data)
    train, valid, test = found["sizes"]
    assert (train >= 20, valid >= 8, test) == (True, True, None)


def test_a_validation_set_is_what_training_leaves_out_or_a_whole_corpus(folder):
    data = {"blend": {"odd": 1.0}, "split": "80,10,10", "validation_sets": {"near": {"odd": 1.0}, "far": {"even": 1.0}}}
    found = samples(folder, data)
    assert found["sets"]["near"] >= 8 and found["sets"]["far"] >= 8
    assert found["documents"] == {
        "near": {"odd-0": [24, 25, 26], "odd-1": [24, 25, 26]},
        "far": {"even-0": list(range(60))},
    }


def test_a_validation_set_that_a_parent_trained_on_is_what_the_parent_held_out(folder):
    sets = {"validation_sets": {"far": {"even": 1.0}}}
    whole = {"blend_per_split": {"train": {"odd": 1.0}, "valid": {"odd": 1.0}, "test": None}}
    for data in ({"blend": {"odd": 1.0}, "split": "80,10,10"}, whole):
        found = samples(folder, {**data, **sets}, held_out={"even": "90,5,5"})
        assert found["documents"] == {"far": {"even-0": [54, 55, 56]}} and found["sets"]["far"] >= 8
