"""Where a bundle is made again, and what must not happen there."""

import importlib.metadata

import pytest

from megaboa.bundle.archive import pack
from megaboa.bundle.crate import METADATA, metadata
from megaboa.bundle.rebuild import MARKER, claim, opened, other_packages
from megaboa.errors import InputError
from megaboa.files import canonical
from reproduce import reproduce, show

MANIFEST = {"experiment": "tiny", "config": [], "device": ["cpu"], "environment": {"packages": {}}}


def bundle_of(path, files, **changed):
    files = {"bundle.json": canonical(MANIFEST).encode(), **files}
    crate = canonical(metadata(files, MANIFEST, "Tiny", None, 0.0)).encode()
    path.write_bytes(pack({**files, METADATA: crate, **changed}))
    return path


@pytest.mark.parametrize("changed", [{"b": b"y"}, {"more": b"x"}])
def test_files_are_those_of_the_metadata(tmp_path, changed):
    files, manifest = opened(bundle_of(tmp_path / "x.zip", {"a b/ä": b"x", "b": b"x"}))
    assert manifest == MANIFEST and files["a b/ä"] == b"x"
    [name] = changed
    with pytest.raises(InputError, match=rf"{name} is not what ro-crate-metadata\.json says"):
        opened(bundle_of(tmp_path / "x.zip", {"b": b"x"}, **changed))


def test_what_is_no_bundle_is_one_sentence(tmp_path):
    (tmp_path / "x.zip").write_bytes(pack({"bundle.json": b"{}"}))
    with pytest.raises(InputError, match=r"is no bundle of this project, as it has no ro-crate-metadata\.json"):
        opened(tmp_path / "x.zip")
    (tmp_path / "x.zip").write_bytes(pack({"bundle.json": b"{}", METADATA: b"[]"}))
    with pytest.raises(InputError, match="can't be read"):
        opened(tmp_path / "x.zip")


def test_nothing_compared_is_nothing_shown():
    with pytest.raises(InputError, match="has none to compare with"):
        show("figures", [])


def test_a_folder_of_the_users_is_refused_and_left_alone(tmp_path):
    bundle, mine = bundle_of(tmp_path / "x.zip", {}), tmp_path / "mine" / "report" / "thesis.tex"
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


def test_code_of_a_bundle_is_announced_and_sees_no_secrets(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("DB_PASSWORD", "short")
    monkeypatch.setenv("HARMLESS", "seen")
    monkeypatch.setenv("TRACKER", "postgres://me:word@host")
    script = b"import os, sys; asked = 'HF_TOKEN DB_PASSWORD HARMLESS TRACKER'.split()\n"
    script += b"sys.exit(' '.join(name for name in asked if name in os.environ))"
    bundle = bundle_of(tmp_path / "x.zip", {"workflow/scripts/report.py": script})
    with pytest.raises(InputError, match="the report could not be made again"):
        reproduce(bundle, tmp_path / "out", figures_only=True)
    said = capfd.readouterr()
    assert said.out.startswith(f"code of {bundle} runs now as you") and said.err == "HARMLESS\n"


def test_packages_of_other_versions_are_named():
    ours = importlib.metadata.version("pytest")
    manifest = {"environment": {"packages": {"pytest": ours, "pandas": "0.1", "no-such-package": "1"}}}
    pandas = importlib.metadata.version("pandas")
    assert other_packages(manifest) == [
        "no-such-package: 1 in the bundle, none here",
        f"pandas: 0.1 in the bundle, {pandas} here",
    ]
