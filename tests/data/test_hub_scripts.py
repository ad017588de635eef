"""Datasets of the hub over HTTP, as the jobs read them: Python scripts, the branch of Parquet files, conversations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_stand_in import NAME, PARQUET, serving
from making import specification

from megaboa.files import canonical, read_json
from megaboa.records import plain

pytestmark = pytest.mark.slow  # `datasets` takes seconds to import

JOBS = """
import json, sys
from megaboa.__main__ import main
for words in json.loads(sys.argv[1]):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    print("ended with", code)
    if words[0] == "list-sources":
        sys.modules.pop("torch", None)  # each job is a process of its own
"""


def calls(root, hub, bpe, *changes, name=NAME):
    """What list-sources says for every change of the corpus; of the last, the other jobs are called too."""
    words = []
    for number, changed in enumerate(changes):
        spec = root / f"{number}.json"
        spec.write_text(canonical(plain(specification(root, f"hf:{name}", bpe, **changed))))
        words.append(["list-sources", "--spec", str(spec), "--out", str(root / f"{number}-sources.json")])
    given = ["--spec", str(spec), "--sources", str(root / f"{number}-sources.json")]
    if bpe:  # chat examples have no tokenizer yet: the run's template tokenizes them
        words.append(["tokenize-shard", *given, "--shard", "0", "--shards", "1", "--out", str(root / "shard.json")])
    words.append(["merge-corpus", *given, "--shards", "1", "--out", str(root / "c.json")])
    own = {"HF_ENDPOINT": hub, "HF_HOME": str(root / "hf"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
    done = subprocess.run(
        [sys.executable, "-c", JOBS, json.dumps(words)],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


def test_a_script_is_read_from_the_branch_of_parquet_files(bpe, tmp_path):
    with serving("plain_text") as hub:
        said = calls(
            tmp_path,
            hub,
            bpe,
            {},
            {"subset": "other", "revision": "refs/convert/parquet"},
            {"revision": "refs/convert/parquet"},
        )
    assert (
        f"corpus source hf:{NAME}: the dataset is a Python script, which `datasets` doesn't run any more: set "
        "`revision: refs/convert/parquet`, where the hub keeps its rows as Parquet files"
    ) in said
    assert "has no subset 'other': set `subset` to one of plain_text" in said
    assert "Traceback" not in said
    (file,) = read_json(tmp_path / "2-sources.json")["files"]
    assert file["stream"]["folder"] == "plain_text" and file["stream"]["revision"] == PARQUET
    assert read_json(tmp_path / "c.json")["documents"] == 20, said


def test_several_subsets_must_be_told_apart(bpe, tmp_path):
    with serving("en", "fr") as hub:
        said = calls(
            tmp_path,
            hub,
            bpe,
            {"revision": "refs/convert/parquet"},
            {"subset": "fr", "revision": "refs/convert/parquet"},
        )
    assert "has several subsets: set `subset` to one of en, fr" in said
    assert read_json(tmp_path / "1-sources.json")["files"][0]["stream"]["folder"] == "fr"
    assert read_json(tmp_path / "c.json")["documents"] == 20, said


def test_a_hub_that_answers_401_is_one_sentence(bpe, tmp_path):
    with serving("plain_text") as hub:
        said = calls(tmp_path, hub, bpe, {}, name="some/private")
    (sentence,) = [line for line in said.splitlines() if line.startswith("ended with error: ")]
    assert sentence.startswith("ended with error: corpus source hf:some/private: the hub refuses it (")
    assert "401" in sentence and sentence.endswith("or run `hf auth login` with an account that may read it")


def test_conversations_of_the_hub_become_examples(tmp_path):
    chat = [{"role": "user", "content": "Wie heißt du?"}, {"role": "assistant", "content": "Äffchen."}]
    with serving("chats", rows={"conversation": [chat] * 7}) as hub:
        said = calls(tmp_path, hub, None, {"revision": "refs/convert/parquet", "messages": "conversation", "limit": 5})
    manifest = read_json(tmp_path / "c.json")
    found = [json.loads(line) for line in Path(manifest["examples"]["path"]).read_text().splitlines()]
    assert found == [{"messages": chat}] * 5 and manifest["documents"] == 5, said
