"""megaboa.bridge.tuned_samples: which tokens count, by Bridge's own datasets; templates that are wrong are noticed."""

import json
from dataclasses import replace

import made
import pytest
from cpu_ranks import on_cpu

from megaboa.data import tokenizer
from megaboa.files import file_digest, write_json
from megaboa.paths import RunFolder
from megaboa.records import Examples, plain, write

pytestmark = pytest.mark.slow

CHATML = "".join(
    (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>",
        "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}",
    )
)
TURNS = [("system", "Be brief."), ("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "two is 2")]
CHAT = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
ARCHITECTURE = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
ARCHITECTURE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}
CASES = {
    "chats": (CHATML, {}),
    "last": (CHATML, {"loss_on": "last-answer"}),
    "everything": (CHATML, {"loss_on": "everything"}),
    "joined": ("none", {"corpus": "pairs"}),
    "promoted": (CHATML, {"corpus": "pairs"}),
    "none at all": (None, {}),
    "no marks": ("{% for m in messages %}{{ m.content }} {% endfor %}", {}),
    "other fields": ("{% generation %}{% for m in messages %}{{ m.value }}.{% endfor %}{% endgeneration %}", {}),
    "all marked": ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}", {}),
    "answers left out": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}ok"
        "{% endgeneration %}{% endif %}{% endfor %}",
        {},
    ),
    "refuses": ("{{ raise_exception('roles must alternate') }}", {}),
    "cut off": (CHATML, {"seq_length": 16}),
    "too few to validate": (CHATML, {"split": "96,4,0"}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of every case what was found, or what the error says."""
    root = tmp_path_factory.mktemp("tuned")
    tokenizer.train([" ".join(content for _, content in TURNS), "prompt answer"] * 50, 300, root / "tokenizer")
    (root / "hf").mkdir()
    write_json(root / "hf" / "config.json", {**ARCHITECTURE, "architectures": ["Qwen3ForCausalLM"]})
    experiment = root / "results" / "e"
    facts = {"vocab_size": 300, "tokenizer": str(root / "tokenizer"), "weights": False}
    write(experiment / "models" / "m" / "source.json", made.source(path=str(root / "hf"), **facts))
    for name, row in (("messages", CHAT), ("pairs", {"prompt": "two? ", "answer": "two is 2"})):
        path = root / f"{name}.jsonl"
        path.write_text((json.dumps(row) + "\n") * 40)
        about = {"kind": name, "count": 40, "turns": 80, "size": path.stat().st_size}
        examples = Examples(**about, sha256=file_digest(path), path=str(path))
        write(experiment / "data" / f"{name}.json", replace(made.corpus(), documents=40, examples=examples))
    for name, (template, more) in CASES.items():
        write_json(experiment / "runs" / name / "run.json", run_of(template, **more))
    write_json(root / "cases.json", list(CASES))
    [result] = on_cpu(_build, str(root))
    return result


def run_of(template, corpus="messages", loss_on="answers", seq_length=128, split="80,20,0"):
    training = {"train_iters": 4, "global_batch_size": 4, "micro_batch_size": 2, "precision": "fp32", "seed": 1}
    return {
        "model": {"name": "m", "init": "pretrained", "config": ARCHITECTURE, "tokenizer": None},
        "data": {"blend": {corpus: 1.0}, "split": split},
        "training": {**training, "seq_length": seq_length, "eval_iters": 1},
        "device": "cpu",
        "task": "sft",
        "tuning": {"template": template, "loss_on": loss_on, "pack": False},
    }


def _build(root):
    from pathlib import Path

    from megaboa.bridge import tuned_samples
    from megaboa.bridge.quiet import quietly

    found = {}
    for name in CASES:
        try:
            with quietly():
                found[name] = tuned_samples.build(
                    RunFolder(Path(root, "results/e/runs", name)), Path(root, "cache", name)
                )
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def counted(found, name):
    """The stretches of the shown example that count."""
    return [text for text, counts in found[name]["examples"]["shown"]["pieces"] if counts]


def test_answers_count_with_what_ends_them_and_nothing_else(found):
    assert counted(found, "chats") == ["1<|end|>", "two is 2<|end|>"]
    assert "".join(text for text, _ in found["chats"]["examples"]["shown"]["pieces"]).startswith("<|system|>Be brief.")
    assert counted(found, "last") == ["two is 2<|end|>"]
    [everything] = counted(found, "everything")
    assert everything.endswith("two is 2<|end|>") and "Be brief" in everything


def test_prompts_and_answers_are_joined_or_become_a_conversation(found):
    [answer] = counted(found, "joined")
    assert answer.startswith("two is 2") and found["joined"]["examples"]["template"] == "none"
    assert counted(found, "promoted") == ["two is 2<|end|>"]


def test_examples_are_shared_out_and_counted(found):
    facts = found["chats"]
    assert facts["samples"] == {"train": 32, "valid": 8}
    read = facts["examples"]
    assert (read["examples"], read["cut"], read["silent"], read["positions"]) == (32, 0, 0, 32 * 128)
    assert read["tokens"] == 32 * read["longest"] and 0 < read["counted"] < read["tokens"]
    assert facts["corpora"][0]["epochs"] == 0.5


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("none at all", "has no chat template: set tuning.template"),
        ("no marks", "nothing in the chat template says which tokens are the assistant's"),
        ("other fields", "the chat template leaves out what the assistant says last"),
        ("all marked", "every token would count in the loss"),
        ("answers left out", "leaves out what the assistant says last in example 1 ('two is 2')"),
        ("refuses", "the chat template refuses an example (roles must alternate)"),
        ("cut off", "not one token of the answers would count in the loss"),
        ("too few to validate", "leaves 2 examples for valid, and a batch is 4"),
    ],
)
def test_what_would_train_on_nothing_or_on_the_wrong_tokens_is_an_error(found, case, said):
    assert isinstance(found[case], str) and found[case].startswith("InputError: ") and said in found[case], found[case]


def test_the_records_take_what_was_found(found):
    from megaboa.records import ExamplesRead, parse

    assert plain(parse(ExamplesRead, found["chats"]["examples"], "facts"))["template"] == "a file of the experiment's"
