"""What the hub answers, in sentences."""

import httpx
import pytest
from huggingface_hub import errors

from megaboa.data import hub
from megaboa.data.errors import InputError


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.GatedRepoError, "x is gated: ask for access at https://huggingface.co/datasets/o/n"),
        (errors.RevisionNotFoundError, "x: there is no such commit, tag or branch"),
        (errors.RepositoryNotFoundError, "x is not on the hub, or is private: check the spelling"),
    ],
)
def test_a_refusal_is_one_sentence(kind, said):
    answer = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
    with pytest.raises(InputError, match=f"^{said}"), hub.refusals("x", page="datasets/o/n"):
        raise kind("no", response=answer)


def test_other_errors_are_left_to_the_caller():
    with pytest.raises(TimeoutError), hub.refusals("x", page="o/n"):
        raise TimeoutError
