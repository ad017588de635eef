"""What is written in the experiment arrives in Bridge as the same value of the same type."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from megaboa.bridge.overrides import hydra_overrides


def arrived(value):
    (override,) = OverridesParser.create().parse_overrides(hydra_overrides({"model.field": value}))
    assert override.key_or_group == "model.field"
    return override.value()


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -3,
        1.5e-8,
        "text",
        "true",
        "10",
        "null",
        "a, b = {c: [d]}",
        "it's",
        'a "quote"',
        "C:\\dir\\",
        "\\'",
        "",
        "$HOME",
        [],
        [1, "1", [True]],
        {"a": 1, "b": ["x"]},
    ],
)
def test_values_keep_their_type(value):
    found = arrived(value)
    assert _plain(found) == value and type(_plain(found)) is type(value)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20))
def test_any_printable_text_arrives_as_it_is(text):
    assert _plain(arrived(text)) == text


def _plain(value):
    """Hydra hands out quoted strings as objects that remember their quotes."""
    if hasattr(value, "text"):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value
