"""Corpora of examples for fine-tuning: read from what people have, written as one form, compared with their source."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from making import specification

from megaboa.data import examples, jobs
from megaboa.errors import InputError

CHAT = [{"role": "user", "content": "Wie heißt du?"}, {"role": "assistant", "content": "Äffchen."}]
SHAREGPT = [{"from": "human", "value": "Wie heißt du?"}, {"from": "gpt", "value": "Äffchen."}]


def corpus(folder, rows, **changes):
    """The manifest, what it was verified by, and the examples."""
    if isinstance(rows, list):
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    asked = specification(folder, rows if isinstance(rows, str) else path, "", **changes)
    spec = replace(asked, tokenizer=None)
    listing = jobs.list_sources(spec, 1)
    manifest = jobs.merge_shards(spec, listing, 1)
    return spec, listing, manifest, [json.loads(line) for line in Path(manifest.examples.path).open(encoding="utf-8")]


@pytest.mark.parametrize("turns", [CHAT, SHAREGPT])
def test_conversations_have_one_form_whatever_theirs_was(tmp_path, turns):
    spec, listing, manifest, found = corpus(tmp_path, [{"chat": {"turns": turns}}] * 2, messages="chat.turns")
    assert found == [{"messages": CHAT}] * 2
    assert (manifest.examples.kind, manifest.examples.count, manifest.examples.turns) == ("messages", 2, 2)
    assert (manifest.documents, manifest.tokens, manifest.datasets) == (2, 0, ())
    assert jobs.verify_corpus(spec, listing, manifest, lambda *_: []).compared == 2


@pytest.mark.parametrize("nested", [True, False])
def test_datasets_from_disk_are_read_as_they_were_saved(tmp_path, nested):
    columns = {name: [turn[name] for turn in CHAT] for name in ("role", "content")}
    rows = {"messages": [CHAT if nested else columns] * 3}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(tmp_path / "saved")
    *_, found = corpus(tmp_path, str(tmp_path / "saved"), messages="messages")
    assert found == [{"messages": CHAT}] * 3


def test_prompts_and_answers_keep_their_blanks(tmp_path):
    rows = [{"q": " 1+1 ", "a": " 2\n", "id": 7}, {"q": "2+2", "a": "4"}]
    *_, manifest, found = corpus(tmp_path, rows, prompt="q", answer="a", limit=1)
    assert found == [{"prompt": " 1+1 ", "answer": " 2\n"}]
    assert manifest.examples.kind == "pairs"


def test_a_prompt_of_several_fields_is_joined_by_blank_lines(tmp_path):
    rows = [{"q": " Add.", "more": more, "a": "4"} for more in ("2 and 2 ", "", " ")]
    *_, found = corpus(tmp_path, rows, prompt=["q", "more"], answer="a")
    assert [row["prompt"] for row in found] == [" Add.\n\n2 and 2 ", " Add.", " Add."]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": CHAT[:1]}, "no turn of the role 'assistant'.*it has user"),
        ({"messages": "hello"}, "holds no list of turns"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "'content' isn't text"),
        ({"messages": [CHAT[0], {"role": "assistant"}]}, "a turn of 'assistant' without 'content'"),
        ({"messages": [{"from": "gpt", "text": "hello"}]}, "a turn of 'assistant' without 'value'"),
        ({"messages": [*CHAT, {"role": "assistant", "content": ""}]}, "a turn of 'assistant' that is empty"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": " \n"}]}, "a turn of 'assistant' that is blank"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "'weight': 0, which can't leave a turn out of the loss"),
        ({"text": "hello"}, "no key 'messages'; set the corpus's `messages` to one of"),
    ],
)
def test_what_can_not_be_learned_from_is_named_with_its_line(tmp_path, row, said):
    rows = [{"messages": CHAT}, row]
    with pytest.raises(InputError, match=rf"rows.jsonl:2: .*{said}.*corpora.c.on_bad_record"):
        corpus(tmp_path, rows, messages="messages")
    *_, manifest, found = corpus(tmp_path, rows, messages="messages", on_bad_record="skip")
    assert len(found) == 1 and manifest.bad.records == 1 and "rows.jsonl:2" in manifest.bad.samples[0]


def test_an_openai_weight_of_1_changes_nothing_nor_does_any_of_what_never_counts(tmp_path):
    turns = [{**CHAT[0], "weight": 0}, {**CHAT[1], "weight": 1}]
    *_, found = corpus(tmp_path, [{"messages": turns}], messages="messages")
    assert found == [{"messages": CHAT}]


def test_an_empty_answer_and_an_empty_corpus_are_refused(tmp_path):
    for answer, said in (("", "empty"), (" \n", "blank")):
        with pytest.raises(InputError, match=f"'a' is {said}"):
            corpus(tmp_path, [{"q": "1", "a": answer}], prompt="q", answer="a")
    with pytest.raises(InputError, match="holds no example"):
        corpus(tmp_path, [{"q": "1", "a": ""}], prompt="q", answer="a", on_bad_record="skip")


def test_a_file_that_has_changed_is_no_longer_what_its_source_says(tmp_path):
    spec, listing, manifest, _ = corpus(tmp_path, [{"messages": CHAT}], messages="messages")
    Path(manifest.examples.path).write_text('{"messages":[]}\n')
    with pytest.raises(InputError, match="has changed since it was written"):
        jobs.verify_corpus(spec, listing, manifest, lambda *_: [])


def test_the_identity_is_of_content_and_keys(tmp_path):
    digests = [
        corpus(tmp_path / name, rows, messages="messages")[2].digest
        for name, rows in (
            ("one", [{"messages": CHAT, "more": 1}]),
            ("two", [{"messages": CHAT}]),
            ("other", [{"messages": CHAT}] * 2),
        )
        if (tmp_path / name).mkdir() is None
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_corpus_of_an_earlier_version_is_made_again(tmp_path, monkeypatch):
    """It has records that are bad now, so that its check would fail."""
    monkeypatch.setattr(examples, "VERSION", 1)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    _, before, *_ = corpus(tmp_path, str(tmp_path / "rows.jsonl"), messages="messages")
    monkeypatch.undo()
    _, now, *_ = corpus(tmp_path, str(tmp_path / "rows.jsonl"), messages="messages")
    assert now.identity == {**before.identity, "examples": 2} and now.folder != before.folder


def test_text_is_no_example(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(InputError, match=r"a.txt holds text, and examples are records"):
        corpus(tmp_path, str(tmp_path / "a.txt"), messages="messages")


def test_the_standard_library_asks_and_answers(tmp_path):
    *_, found = corpus(tmp_path, "python-stdlib", prompt="question", answer="answer", limit=20)
    assert len(found) == 20 and all(row["prompt"].startswith("What does ") for row in found)
