"""Where a bundle is made again, and what must not happen there."""

import pytest

from megaboa.bundle.archive import pack
from megaboa.bundle.rebuild import MARKER, claim
from megaboa.data.errors import InputError
from reproduce import reproduce

MANIFEST = b'{"experiment": "tiny", "config": [], "device": ["cpu"]}'


def test_a_folder_of_the_users_is_refused_and_left_alone(tmp_path):
    bundle, mine = tmp_path / "x.zip", tmp_path / "mine" / "report" / "thesis.tex"
    bundle.write_bytes(pack({"bundle.json": MANIFEST}))
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(InputError, match=r"--into .*mine: is there already, .* nothing in it was touched"):
        reproduce(bundle, tmp_path / "mine", figures_only=True)
    assert mine.read_text() == "mine" and list((tmp_path / "mine").rglob("*")) == [mine.parent, mine]


def test_a_new_an_empty_and_a_marked_folder_are_taken(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new/deep", "empty"):
        claim(tmp_path / name)
        (tmp_path / name / "report").mkdir()
        claim(tmp_path / name)
        assert (tmp_path / name / MARKER).is_file()
