"""Names of variables that hold secrets."""

import pytest

from megaboa.secrets import is_secret_name, secrets_in


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        *("AWS_SESSION_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MY_TOKEN", "MY_KEYS", "DB_PASSWD", "GOOGLE_CREDENTIALS"),
        *("COMET_API_KEY", "api_key", "apiKey", "SECRET"),
    ],
)
def test_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY_BUSINESS", "PATH", "DBUS_SESSION"])
def test_others(name):
    assert not is_secret_name(name)


def test_values_that_are_too_short_to_be_searched_for_are_left():
    assert secrets_in({"A_KEY": "x", "B_TOKEN": "long enough", "HOME": "/home/ada"}) == {"B_TOKEN": "long enough"}
