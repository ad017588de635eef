"""Names of variables that hold secrets."""

import pytest

from megaboa.secrets import has_credentials, is_secret_name, secrets_in


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        *("AWS_SESSION_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MY_TOKEN", "MY_KEYS", "DB_PASSWD", "GOOGLE_CREDENTIALS"),
        *("COMET_API_KEY", "api_key", "apiKey", "SECRET", "PGPASSWORD", "OPENAI_APIKEY", "DB_PASS", "GITHUB_PAT"),
        *("HF_TOKEN2", "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY_BUSINESS", "PATH", "DBUS_SESSION", "PWD", "OLDPWD", "COMPASS"],
)
def test_others(name):
    assert not is_secret_name(name)


def test_values_that_are_too_short_to_be_searched_for_are_left():
    assert secrets_in({"A_KEY": "x", "B_TOKEN": "long enough", "HOME": "/home/ada"}) == {"B_TOKEN": "long enough"}


def test_addresses_with_passwords():
    assert has_credentials("postgres://me:abc@host/db") and has_credentials("https://t0ken@git.here/x")
    assert not any(map(has_credentials, ["ssh://git@here/x", "https://here/x?a=b@c", "git@here:x", "http://here:80/x"]))
    assert secrets_in({"DATABASE_URL": "postgres://me:abc@host/db"})
