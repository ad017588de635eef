"""BERT's and T5's samples from a corpus of whole documents, and the masks and losses that are made of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cpu_ranks import on_cpu

DOCUMENTS = 6


class Words:
    """A tokenizer of 50 words without any special token but the one that ends a text."""

    vocab_size = 50
    inv_vocab = {number: f"w{number}" for number in range(50)}  # noqa: RUF012
    eos = eod = 0
    unique_identifiers = {"class": "Words"}  # noqa: RUF012

    @property
    def mask(self):
        raise AttributeError("no mask token")

    cls = sep = None


def corpus(folder):
    """Documents of 5, 17, 29, ... tokens; no token tells which document it is of, but its place in it."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "text.bin"), dtype=np.uint16)
    lengths = [5 + 12 * number for number in range(DOCUMENTS)]
    for length in lengths:
        builder.add_document(1 + np.arange(length) % 49, [length])
    builder.finalize(str(folder / "text.idx"))
    return str(folder / "text"), lengths


def config(kind, prefix, folder, **given):
    from megaboa.bridge import masked_data

    made = getattr(masked_data, kind)(
        **{"random_seed": 7, "seq_length": 40, "split": "1,0,0", "blend": ([prefix], None) if prefix else None},
        **{"path_to_cache": str(folder / "cache"), "reset_position_ids": False, "reset_attention_mask": False},
        **{"eod_mask_loss": False, "tokenizer": Words(), **given},
    )
    made.finalize()
    return made


def pieces(folder):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from megaboa.bridge.masked_data import Pieces

    prefix, lengths = corpus(folder)
    whole = IndexedDataset(prefix)
    cut = Pieces(whole, 7)
    for number, length in enumerate(lengths):
        of_it = range(cut.document_indices[number], cut.document_indices[number + 1])
        assert [len(cut[one]) for one in of_it] == [cut.sequence_lengths[one] for one in of_it]
        assert max(cut.sequence_lengths[of_it.start : of_it.stop]) <= 7 and len(of_it) == -(-length // 7)
        assert np.concatenate([cut[one] for one in of_it]).tolist() == whole[number].tolist()
    return len(cut) == len(cut.sequence_lengths) == cut.document_indices[-1]


def test_pieces_are_the_documents(tmp_path):
    assert on_cpu(pieces, tmp_path) == [True]


def samples(folder, kind, number=50, **given):
    """Samples, read twice, and once by a dataset that finds the index."""
    from megaboa.bridge.masked_data import build

    prefix, lengths = corpus(folder)
    made = config(kind, prefix, folder, **given)
    found = []
    for _ in range(2):
        dataset, _, _ = build([number, 0, 0], made)
        found += [[dataset[one] for one in range(number)] for _ in range(2)]
    for again in found[1:]:
        for one, other in zip(found[0], again, strict=True):
            assert all(np.array_equal(one[name], other[name]) for name in one)
    assert dataset.tokens == sum(lengths)
    return found[0]


def test_words_of_bert_are_masked_and_known_to_the_loss(tmp_path):
    """The tokenizer has no [CLS], [SEP] and [MASK]: they are 50, 51 and 52."""
    (found,) = on_cpu(samples, tmp_path, "BertDatasetConfig")
    kept, masked = 0, 0
    for one in found:
        text, there = one["text"], one["padding_mask"].astype(bool)
        assert text[0] == 50 and (text[there] == 51).sum() == 2 and text[there][-1] == 51 and len(text) == 40
        assert not text[~there].any() and not one["types"][~there].any() and not one["loss_mask"][~there].any()
        assert set(one["types"][there]) == {0, 1}
        lost = one["loss_mask"].astype(bool)
        assert lost.sum() <= 6 and not one["labels"][~lost].any() and one["labels"][lost].all()  # 15% of 40
        masked += int((text[lost] == 52).sum())
        kept += int(lost.sum())
    assert kept > 150 and 0.6 < masked / kept < 0.95  # 80% of those that are to be told
    assert {one["is_random"].item() for one in found} == {0, 1}


def test_spans_of_t5_are_what_its_decoder_writes(tmp_path):
    """Sentinels are 53 and more, as [MASK], BOS and EOS (of which the tokenizer has the last) come first."""
    (found,) = on_cpu(samples, tmp_path, "T5DatasetConfig", 50)
    for one in found:
        there, said = one["enc_mask"].astype(bool), one["loss_mask"].astype(bool)
        read, written, labels = one["text_enc"][there], one["text_dec"][said], one["labels"][said]
        assert written[0] == 51 and labels[-1] == 0 and labels[:-1].tolist() == written[1:].tolist()
        spans = read[read >= 53].tolist()
        assert spans == list(range(53, 53 + len(spans))) and [t for t in written if t >= 53] == spans
        answers = {}
        for token in written[1:].tolist():
            if token >= 53:
                answers[token] = last = []
            else:
                last.append(token)
        whole = [word for token in read.tolist() for word in answers.get(token, [token])]
        assert all(b == a % 49 + 1 for a, b in itertools.pairwise(whole)), "a run of the document's words"


def a_corpus_of_sentences(folder):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megaboa.bridge.masked_data import Pieces, build

    builder = IndexedDatasetBuilder(str(folder / "cut.bin"), dtype=np.uint16)
    for _ in range(3):
        builder.add_document(np.arange(1, 31), [10, 5, 15])
    builder.finalize(str(folder / "cut.idx"))
    dataset, _, _ = build([4, 0, 0], config("BertDatasetConfig", str(folder / "cut"), folder))
    return isinstance(dataset.dataset, Pieces), dataset.dataset.sequence_lengths[:3].tolist()


def test_a_corpus_that_is_cut_into_sentences_is_read_by_them(tmp_path):
    assert on_cpu(a_corpus_of_sentences, tmp_path) == [(False, [10, 5, 15])]


def without_a_corpus(folder):
    from megaboa.bridge.masked_data import BertDatasetConfig, build

    made = config("BertDatasetConfig", None, folder)
    with pytest.raises(ValueError, match="data: words are masked in a text, and there is none: name a corpus"):
        build([4, 0, 0], made)
    return isinstance(made, BertDatasetConfig)


def test_without_a_corpus_there_is_nothing_to_mask(tmp_path):
    assert on_cpu(without_a_corpus, tmp_path) == [True]


def masks():
    import torch

    from megaboa.bridge.masked_steps import t5_masks

    read, written = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 1, 0]])
    tokens = torch.tensor([[0, 5, 6, 0]]), torch.tensor([[0, 9, 0]])  # token 0 is a word here, too
    encoder, decoder, cross = t5_masks(read, written, *tokens)
    return (~encoder[0, 0]).long().tolist(), (~decoder[0, 0]).long().tolist(), (~cross[0, 0]).long().tolist()


def test_t5_sees_what_is_there_and_what_it_has_written():
    """The first token of the decoder, too, whose number is that of core's padding."""
    encoder, decoder, cross = on_cpu(masks)[0]
    assert encoder == [[1, 1, 1, 0]] * 3 + [[0, 0, 0, 0]]
    assert decoder == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert cross == [[1, 1, 1, 0]] * 2 + [[0, 0, 0, 0]]


def loss():
    import torch

    from megaboa.bridge.masked_steps import bert_loss

    losses, mask = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[0, 1, 0, 1]])
    order = torch.tensor([[0.0, 0.0]])
    checks = {"check_for_nan_in_loss": False, "check_for_spiky_loss": False}
    total, tokens, told = bert_loss(mask, torch.tensor([1]), (losses, order), checks)
    return float(total / tokens), {name: value.tolist() for name, value in told.items()}


def test_the_loss_of_the_order_weighs_as_much_as_that_of_the_words():
    mean, told = on_cpu(loss)[0]
    assert mean == pytest.approx(3.0 + np.log(2))
    assert told == {"lm loss": [6.0, 2.0], "sop loss": [pytest.approx(np.log(2)), 1.0]}
