"""A pinned checkout of Megatron-Bridge: only that commit, once, or one sentence."""

import subprocess

import pytest

from megaboa.errors import InputError
from megaboa.image import bridge_source
from megaboa.records import BridgeSource


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """Two commits; the second is on another branch."""
    folder = tmp_path / "bridge"
    (folder / bridge_source.PACKAGE).parent.mkdir(parents=True)
    (folder / bridge_source.PACKAGE).write_text("one")
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "one")
    git(folder, "checkout", "--quiet", "-b", "other")
    (folder / bridge_source.PACKAGE).write_text("two")
    git(folder, "commit", "--quiet", "-am", "two")
    return folder


def test_the_files_of_the_commit(repository, tmp_path):
    for branch, text in (("main", "one"), ("other", "two")):
        source = BridgeSource(repo=str(repository), commit=git(repository, "rev-parse", branch))
        folder = bridge_source.check_out(str(tmp_path / "store"), source)
        assert folder == bridge_source.folder(str(tmp_path / "store"), source)
        assert (folder / bridge_source.PACKAGE).read_text() == text
        assert bridge_source.check_out(str(tmp_path / "store"), source) == folder


def test_a_commit_that_is_not_there(repository, tmp_path):
    source = BridgeSource(repo=str(repository), commit="1" * 40)
    with pytest.raises(InputError, match=f"has no commit {'1' * 40}: check both"):
        bridge_source.check_out(str(tmp_path / "store"), source)
    assert not bridge_source.folder(str(tmp_path / "store"), source).exists()


def test_a_repository_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"cloning .*/none failed: .*does not exist"):
        bridge_source.check_out(str(tmp_path / "store"), BridgeSource(repo=str(tmp_path / "none"), commit="1" * 40))


def test_another_project(repository, tmp_path):
    git(repository, "mv", str(bridge_source.PACKAGE), "elsewhere")
    git(repository, "commit", "--quiet", "-m", "moved")
    source = BridgeSource(repo=str(repository), commit=git(repository, "rev-parse", "HEAD"))
    with pytest.raises(InputError, match="is not a checkout of Megatron-Bridge"):
        bridge_source.check_out(str(tmp_path / "store"), source)


def test_what_looks_like_an_option_is_a_repository(tmp_path):
    with pytest.raises(InputError, match=r"cloning --upload-pack=x failed: .*'--upload-pack=x' does not exist"):
        bridge_source.check_out(str(tmp_path / "store"), BridgeSource(repo="--upload-pack=x", commit="1" * 40))


def test_nobody_is_asked_for_a_password(fake_command, tmp_path):
    fake_command("git", 'echo "fatal: prompt $GIT_TERMINAL_PROMPT, access to x denied" >&2; exit 128')
    with pytest.raises(InputError, match="cloning https://x/y failed: fatal: prompt 0, access to x denied"):
        bridge_source.check_out(str(tmp_path / "store"), BridgeSource(repo="https://x/y", commit="1" * 40))
