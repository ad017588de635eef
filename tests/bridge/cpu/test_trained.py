"""megaboa.bridge.trained: where generation with an exported chat model ends."""

import cpu_backend_active  # noqa: F401 (before Megatron)
import pytest
from transformers import AutoTokenizer

from megaboa.bridge.trained import end_of_answers, ends
from megaboa.data import tokenizer
from megaboa.files import write_json

pytestmark = pytest.mark.slow

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
OTHER = "{{ raise_exception('needs a tool') }}"
DIVIDES = "{{ 1 // (messages | length - 2) }}"
LIST = "{% for m in messages %}{{ m.content[0].text.strip() }}{% endfor %}"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    tokenizer.train(["one two three"] * 50, 300, folder)
    found = AutoTokenizer.from_pretrained(folder)
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.add_tokens(["<think>"])  # no special one
    return found


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "<think><|im_end|>"), "<|im_end|>"),
        (LLAMA, "eos"),
        (NO_END, None),
        (OTHER, None),
        (DIVIDES, None),
        (LIST, None),
    ],
)
def test_the_first_special_token_behind_an_answer_ends_it(words, tmp_path, template, end):
    words.chat_template = template
    words.save_pretrained(tmp_path)
    expected = {None: None, "eos": words.eos_token_id}.get(end, words.convert_tokens_to_ids(end) if end else None)
    assert end_of_answers(AutoTokenizer.from_pretrained(tmp_path)) == expected


@pytest.mark.parametrize(("given", "found"), [({}, []), ({"eos_token_id": 3}, [3]), ({"eos_token_id": [3, 5]}, [3, 5])])
def test_a_generation_config_has_none_one_or_several_ends(tmp_path, given, found):
    write_json(tmp_path / "generation_config.json", given)
    assert ends(tmp_path) == found
