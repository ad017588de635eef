"""megaboa.calls.configuration: the words of a call."""

from megaboa.calls.configuration import given_values


def test_values_of_the_command_line_are_given_again():
    assert given_values({}) == []
    assert given_values({"experiment": "x", "training": {"train_iters": 5}}) == [
        *("--config", "experiment=x", 'training={"train_iters": 5}')
    ]
