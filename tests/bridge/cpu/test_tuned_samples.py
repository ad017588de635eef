"""megaboa.bridge.tuned_samples: which tokens count, by Bridge's own datasets; templates that are wrong are noticed."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

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
# As Qwen's and Llama's own ones: nothing in them marks what the assistant says, other than its name.
UNMARKED = {
    "chatml": "".join(
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        )
    ),
    "llama3": "".join(
        (
            "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n",
            "{{ m.content }}<|eot_id|>{% endfor %}",
        )
    ),
}
MARKS = {"chatml": ["<|im_start|>", "<|im_end|>"]}
MARKS["llama3"] = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SHIPPED = (Path(__file__).parents[3] / "config/experiments/templates/chatml.jinja").read_text()
NO_MARKS = "{% for m in messages %}{{ m.content }} {% endfor %}"
TEMPLATES = {"m": None, "marked": CHATML, "unmarked": NO_MARKS, **UNMARKED}  # by model, its tokenizer's own
TURNS = [("system", "Be brief."), ("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "two is 2")]
TURNS_OF_LINES = [{"role": "user", "content": "one\u2028two?\x85"}, {"role": "assistant", "content": "two\u2029is 2"}]
CHAT = {"messages": [{"role": role, "content": content} for role, content in TURNS]}
# Of three lengths, so that a packed sequence has room for several, and rarely ends with one.
MIXED = [{"messages": CHAT["messages"][first:end]} for first, end in ((0, 5), (1, 3), (3, 5))]
ARCHITECTURE = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
ARCHITECTURE |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}
CASES = {
    "chats": (CHATML, {}),
    "last": (CHATML, {"loss_on": "last-answer"}),
    "everything": (CHATML, {"loss_on": "everything"}),
    "everything, ChatML": (None, {"model": "chatml", "loss_on": "everything"}),
    "joined": ("none", {"corpus": "pairs"}),
    "long prompts": ("none", {"corpus": "prompts", "split": "100,0,0"}),
    "long answers": ("none", {"corpus": "answers", "split": "100,0,0"}),
    "ends of lines": (CHATML, {"corpus": "lines"}),
    "shipped": (SHIPPED, {"model": "chatml"}),
    "promoted": (CHATML, {"corpus": "pairs"}),
    "none at all": (None, {}),
    "no marks": (NO_MARKS, {}),
    "ChatML in other words": (UNMARKED["chatml"].replace("role }}", "role }} says"), {"model": "chatml"}),
    "no marks of its own": (None, {"model": "unmarked"}),
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
    "tokenizer's": (None, {"model": "marked"}),
    "ChatML": (None, {"model": "chatml"}),
    "Llama 3": (None, {"model": "llama3"}),
    "spelled out": (UNMARKED["chatml"], {}),
    "ChatML, mixed": (None, {"model": "chatml", "corpus": "mixed", "split": "100,0,0"}),
    "ChatML, packed": (None, {"model": "chatml", "corpus": "mixed", "split": "100,0,0", "pack": True}),
    "mixed": (CHATML, {"corpus": "mixed", "split": "100,0,0"}),
    "packed": (CHATML, {"pack": True, "corpus": "mixed", "split": "100,0,0"}),
    "packed for cp": (CHATML, {"pack": True, "corpus": "mixed", "split": "100,0,0", "cp": 2}),
}
READ = (
    "long prompts",
    "long answers",
    "mixed",
    "packed",
    "packed for cp",
    "ChatML, mixed",
    "ChatML, packed",
)  # of which the batches are looked at


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of every case what was found, or what the error says."""
    root = tmp_path_factory.mktemp("tuned")
    tokenizer.train([" ".join(content for _, content in TURNS), "prompt answer"] * 50, 300, root / "tokenizer")
    (root / "hf").mkdir()
    write_json(root / "hf" / "config.json", {**ARCHITECTURE, "architectures": ["Qwen3ForCausalLM"]})
    experiment = root / "results" / "e"
    for model, template in TEMPLATES.items():
        facts = {"vocab_size": 310, "tokenizer": str(of_model(root, model, template)), "weights": False}
        write(experiment / "models" / model / "source.json", made.source(path=str(root / "hf"), **facts))
    pair = {"prompt": "two? ", "answer": "two is 2"}
    rows_of_all = {"messages": [CHAT] * 40, "pairs": [pair] * 40, "mixed": MIXED * 8}
    rows_of_all["prompts"] = [pair, {"prompt": "two? " * 90 + "one? ", "answer": "two is 2"}] * 8
    rows_of_all["answers"] = [pair, {"prompt": "two? ", "answer": "two is 2 " * 90}] * 8
    rows_of_all["lines"] = [{"messages": [*TURNS_OF_LINES]}] * 40
    for name, rows in rows_of_all.items():
        path = root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        kind = "messages" if "messages" in rows[0] else "pairs"
        about = {"kind": kind, "count": len(rows), "turns": 80, "size": path.stat().st_size}
        examples = Examples(**about, sha256=file_digest(path), path=str(path))
        write(experiment / "data" / f"{name}.json", replace(made.corpus(), documents=len(rows), examples=examples))
    for name, (template, more) in CASES.items():
        write_json(experiment / "runs" / name / "run.json", run_of(template, **more))
        write_json(experiment / "runs" / name / "launch.json", {"overrides": {}})
    write_json(root / "cases.json", list(CASES))
    [result] = on_cpu(_build, str(root))
    return result


def of_model(root, model, template):
    """A tokenizer's folder: those of known formats have their marks as tokens, and end with one, as Qwen's have."""
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(root / "tokenizer")
    if model in MARKS:
        words.add_special_tokens({"additional_special_tokens": MARKS[model], "eos_token": MARKS[model][-1]})
    words.chat_template = template
    words.save_pretrained(root / "tokenizers" / model)
    return root / "tokenizers" / model


def run_of(
    template, corpus="messages", loss_on="answers", seq_length=128, split="80,20,0", model="m", pack=False, cp=1
):
    training = {"train_iters": 4, "global_batch_size": 4, "micro_batch_size": 1 if pack else 2, "precision": "fp32"}
    return {
        "model": {"name": model, "init": "pretrained", "config": ARCHITECTURE, "tokenizer": None},
        "data": {"blend": {corpus: 1.0}, "split": split},
        "training": {**training, "seed": 1, "seq_length": seq_length, "eval_iters": 1 if split[:3] != "100" else 0},
        "parallel": {"cp": cp},
        "world_size": cp,
        "device": "cpu",
        "task": "sft",
        "tuning": {"template": template, "loss_on": loss_on, "pack": pack},
    }


def _build(root):
    from pathlib import Path

    from megaboa.bridge import tuned_samples
    from megaboa.bridge.quiet import quietly

    found = {}
    for name in CASES:
        try:
            with quietly():
                folder, cache = RunFolder(Path(root, "results/e/runs", name)), Path(root, "cache", name)
                found[name] = tuned_samples.build(folder, cache)
                if name in READ:
                    found[name]["batch"] = _batch(folder, cache)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _batch(folder, cache):
    """All training samples in one batch, as ranks read them."""
    from megatron.bridge.data.builders.gpt_sft import GPTSFTDatasetBuilder
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    from megaboa.bridge import configuration

    config = configuration.build(folder.run, configuration.Inputs.for_data(folder))
    config.dataset.dataset_root = str(cache)
    tokenizer = build_tokenizer(config.tokenizer)
    data = GPTSFTDatasetBuilder(config.dataset, tokenizer).build()[0]
    batch = data.collate_fn([data[number] for number in range(len(data))])
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}


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


def test_long_prompts_and_answers_are_cut_at_their_end_and_counted(found):
    """What answers are given to stays whole, and what ends an answer comes after all of it."""
    for case, silent in (("long prompts", 8), ("long answers", 0)):
        read, batch = found[case]["examples"], found[case]["batch"]
        assert (read["examples"], read["cut"], read["silent"]) == (16, 8, silent) and read["longest"] > 129
        rows = list(zip(batch["tokens"], batch["labels"], batch["loss_mask"], strict=True))
        [end] = {labels[sum(map(bool, mask)) + mask.index(1) - 1] for tokens, labels, mask in rows[::2]}
        for tokens, labels, mask in rows[1::2]:
            assert len(tokens) == 128 and tokens[:2] == rows[0][0][:2] and end not in (*tokens, *labels)
            assert sum(mask) == (0 if silent else 128 - mask.index(1))


def test_a_text_may_have_any_ends_of_lines(found):
    assert found["ends of lines"]["samples"] == {"train": 32, "valid": 8}
    assert counted(found, "ends of lines") == ["two\u2029is 2<|end|>"]


def test_the_shipped_template_is_chatml_and_its_marks_decide(found):
    """Bridge alone would take the format's ends, with the end of the line."""
    text = "".join(text for text, _ in found["shipped"]["examples"]["shown"]["pieces"])
    assert text == "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in TURNS)
    assert counted(found, "shipped") == ["1<|im_end|>", "two is 2<|im_end|>"]


def test_everything_is_every_token(found):
    [everything] = counted(found, "everything, ChatML")
    assert everything.count("<|im_start|>") == len(TURNS) - 1  # the first token is never predicted


def test_examples_are_shared_out_and_counted(found):
    facts = found["chats"]
    assert facts["samples"] == {"train": 32, "valid": 8}
    read = facts["examples"]
    assert (read["examples"], read["cut"], read["silent"], read["positions"]) == (32, 0, 0, 32 * 128)
    assert read["tokens"] == 32 * read["longest"] and 0 < read["counted"] < read["tokens"]
    assert facts["corpora"][0]["epochs"] == 0.5
    [evaluation] = facts["evaluations"]
    assert (evaluation["unit"], evaluation["asked"], evaluation["there"], evaluation["most"]) == ("samples", 4, 8, 2)
    assert found["ChatML, mixed"]["evaluations"] == [], "nothing is held out"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("none at all", "has no chat template: set tuning.template"),
        ("no marks", "nothing in the chat template says which tokens are the assistant's"),
        (
            "no marks",
            "put {% generation %} and {% endgeneration %} around what it says, in tuning.template of run no marks",
        ),
        (
            "no marks of its own",
            "/tokenizers/unmarked/chat_template.jinja (or a copy in tuning.template) of run no marks",
        ),
        ("refuses", "correct tuning.template of run refuses, or remove the example"),
        (
            "ChatML in other words",
            "nothing in the chat template says which tokens are the assistant's: put {% generation %}",
        ),
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


@pytest.mark.parametrize(
    ("case", "answers"),
    [
        ("tokenizer's", ["1<|end|>", "two is 2<|end|>"]),
        ("ChatML", ["1<|im_end|>\n", "two is 2<|im_end|>\n"]),  # Bridge takes the end of the line for a part of it
        ("Llama 3", ["1<|eot_id|>", "two is 2<|eot_id|>"]),
    ],
)
def test_the_tokenizers_own_template_is_taken_and_known_formats_need_no_marks(found, case, answers):
    assert counted(found, case) == answers
    assert found[case]["examples"]["template"] == "the tokenizer's" and found[case]["examples"]["silent"] == 0


def test_a_known_format_is_found_where_its_marks_are_several_tokens(found):
    assert counted(found, "spelled out")[0] == "1<|im_end|>\n"


def test_packed_examples_begin_at_position_0_and_attention_ends_with_each(found):
    batch = found["packed"]["batch"]
    assert batch["attention_mask"] is None and batch["cu_seqlens_kv"] == batch["cu_seqlens_q"]
    rows = list(zip(batch["position_ids"], batch["cu_seqlens_q"], batch["max_seqlen_q"], strict=True))
    assert len(rows) == found["packed"]["samples"]["train"] < 24 / 1.5
    for positions, ends, [longest] in rows:
        assert ends[0] == 0 and ends[-1] == len(positions) == 128
        lengths = [end - begin for begin, end in pairwise(ends)]
        assert longest == max(lengths)
        examples = [length for length, end in zip(lengths, ends[1:], strict=True) if length and end < 128]
        assert positions[: sum(examples)] == [one for length in examples for one in range(length)]


@pytest.mark.parametrize("case", ["packed", "packed for cp"])
def test_packed_examples_are_those_that_are_not_packed_and_the_same_tokens_count(found, case):
    alone = sorted(strip(row) for row in rows_of(found["mixed"]["batch"]))
    packed = []
    batch = found[case]["batch"]
    ends = batch["cu_seqlens_q_padded" if case == "packed for cp" else "cu_seqlens_q"]
    for row, bounds in zip(rows_of(batch), ends, strict=True):
        stretches = [row[begin:end] for begin, end in pairwise(bounds) if end > begin]
        packed += [strip(stretch) for stretch in stretches if any(counts for *_, counts in stretch)]
        assert case == "packed" or all(len(stretch) % 4 == 0 for stretch in stretches)  # 2 cp parts for every rank
    assert len(alone) == 24 and sorted(packed) == alone


def rows_of(batch):
    """Tokens with what is predicted of them, and whether it counts."""
    columns = (batch[name] for name in ("tokens", "labels", "loss_mask"))
    return [list(zip(*row, strict=True)) for row in zip(*columns, strict=True)]


def strip(row):
    """Without padding, behind what counts last: all examples end with an answer."""
    last = max(number for number, (*_, counts) in enumerate(row) if counts)
    return [(token, label, int(counts)) for token, label, counts in row[: last + 1]]


def test_where_examples_are_packed_nothing_behind_the_tokenizers_last_token_counts(found):
    """Bridge's rule: here the end of the line that a ChatML answer ends with."""
    alone, packed = (sum(map(sum, found[case]["batch"]["loss_mask"])) for case in ("ChatML, mixed", "ChatML, packed"))
    assert alone - packed == sum(turn["role"] == "assistant" for row in MIXED for turn in row["messages"]) * 8
