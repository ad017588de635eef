"""A graph that this machine's cuDNN can't replay is refused before the first step."""

import pytest

from megaboa.bridge.cudnn import refuse_lengths, version
from megaboa.bridge.wheels import is_installed
from megaboa.check.facts import Facts, Kernels, Training
from megaboa.errors import InputError


def graphed(seq_length, attention="auto"):
    kernels = Kernels(graphs="full_iteration", nan_check=False, attention=attention)
    return Facts(kernels=kernels, training=Training(seq_length=seq_length))


@pytest.mark.parametrize("here", [(9, 14, 0), (9, 15, 0)])
def test_an_old_one_and_a_length_that_fills_no_block(here):
    said = r"training.seq_length: 64 .*cuDNN 9\.15\.1.*nearest: 128.*here it is 9\.1.\.0"
    with pytest.raises(InputError, match=said):
        refuse_lengths(graphed(64), here)


@pytest.mark.parametrize("here", [(9, 15, 1), (9, 19, 0), None])
def test_a_newer_one_or_none_at_all(here):
    refuse_lengths(graphed(64), here)


@pytest.mark.parametrize("legal", [graphed(128), graphed(64, "unfused")])
def test_what_an_old_one_can_replay(legal):
    refuse_lengths(legal, (9, 14, 0))


def test_a_machine_without_transformer_engine_has_none_to_ask():
    assert is_installed("transformer_engine_torch") or version() is None
