"""What is advised when a proof fails: converting again only where that can help."""

import pytest

from megaboa.bridge.conversion_jobs import _remedy
from megaboa.bridge.verdict import check


@pytest.mark.parametrize(
    ("failed", "said"),
    [
        (["round trip", "logits"], "; to import it again, remove it"),
        (["files"], "; to import it again, remove it"),
        (["logits"], "; converting it again gives the same: compare m/config.json with what Bridge's converter"),
        (["Megatron parameters"], "; converting it again gives the same"),
        (["trained"], ""),
    ],
)
def test_a_remedy_is_one_that_can_help(failed, said):
    names = ("files", "round trip", "logits", "Megatron parameters", "trained")
    checks = [check(name, name not in failed, "") for name in names]
    found = _remedy(checks, "to import it again, remove it", "m")
    assert found.startswith(said) and bool(found) == bool(said)
