"""A store that a group shares: whatever its users' umasks, each goes on where the other has stopped."""

import contextlib
import os
import stat

import pytest
from pretended_run import Run
from two_users import ALICE, BOB, GROUP, does, folder_for_all, own_folder, shared_folder

from megaboa import errors, store
from megaboa.run import checkpoints, completion
from megaboa.run.call import TrainingFailed

# The child only becomes another user, and does what a new process would.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def place():
    with folder_for_all() as folder:
        yield folder


@pytest.fixture
def users(place, monkeypatch):
    """The same run in a clone of each, and one store."""
    shared_folder(place / "store")

    def run_of(name, user):
        own_folder(place / name, user)
        (place / name / "store").symlink_to(place / "store")
        run = Run(place / name, monkeypatch)
        for path in (place / name).rglob("*"):
            os.lchown(path, user, user)
        return run

    return run_of("alice", ALICE), run_of("bob", BOB)


def rights(folder):
    """Owner, group, mode, inode and time of each file and folder, but for claims."""
    paths = [folder, *(path for path in folder.rglob("*") if "claims" not in path.parts)]
    facts = {path: path.lstat() for path in paths}
    return {path: (one.st_uid, one.st_gid, one.st_mode, one.st_ino, one.st_mtime_ns) for path, one in facts.items()}


def closed_to_the_group(folder):
    found = []
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        wanted = stat.S_IRGRP | stat.S_IWGRP | (stat.S_IXGRP | stat.S_ISGID if path.is_dir() else 0)
        if not path.is_symlink() and (mode & wanted != wanted or path.lstat().st_gid != GROUP):
            found.append(f"{stat.filemode(mode)} {path}")
    return found


def test_a_colleague_resumes_a_run_whatever_the_umasks(users, place):
    alice, bob = users

    def fails():
        with pytest.raises(TrainingFailed):
            alice.train()

    bob.misfortune("attempt == 1 and step == 4 and os.kill(os.getpid(), signal.SIGKILL)")  # both start this rank
    alice.launch(budget=0)
    assert does(ALICE, fails) is None
    assert closed_to_the_group(place / "store") == []
    assert does(BOB, bob.train) is None
    assert bob.attempts == [(0, "failed", "killed"), (4, "completed", None)]
    assert closed_to_the_group(place / "store") == []
    assert {(place / "store" / "runs").stat().st_uid, bob.store.attempt(2).path.stat().st_uid} == {ALICE, BOB}


def call(run):
    """As the command line does."""
    with errors.one_sentence():
        run.train()


KILLED = "attempt == 1 and step == 5 and (time.sleep(0.5), os.kill(os.getppid(), 9), os.kill(os.getpid(), 9))"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_colleague_resumes_a_run_whose_owner_was_killed(umask, users):
    alice, bob = users
    bob.misfortune(KILLED)
    assert does(BOB, bob.train, umask) == "ended with -9"
    assert does(ALICE, alice.train) is None
    assert alice.attempts == [(0, "interrupted", "lost"), (4, "completed", None)]
    assert closed_to_the_group(alice.store.path) == []


def test_a_colleague_resumes_a_run_whose_owner_was_killed_during_the_first_save(users, monkeypatch):
    alice, bob = users
    monkeypatch.setattr(checkpoints, "LOOK_SECONDS", 0.1)
    saves = "attempt == 1 and step == 1 and checkpoints.folder(root, 2).mkdir(parents=True)"
    bob.misfortune(f"{saves}\n    {KILLED.replace('step == 5', 'step == 1')}")
    assert does(BOB, bob.train) == "ended with -9"
    assert does(ALICE, alice.train) is None
    assert alice.attempts == [(0, "interrupted", "lost"), (0, "completed", None)]


def test_an_attempt_that_is_closed_to_a_colleague_is_named_before_training_with_one_command_that_is_enough(users):
    alice, bob = users
    bob.misfortune(KILLED)
    assert does(BOB, bob.train) == "ended with -9"
    place = bob.store.path.resolve()
    for path in (place / "attempts" / "01" / "steps.jsonl", place / "checkpoints" / "iter_0000004" / "__0_0.distcp"):
        path.chmod(0o600)  # as an earlier version left them
    said = does(ALICE, lambda: call(alice))
    assert f"user {BOB} and group {GROUP}, with mode -rw-------: {BOB} can call chmod -R g+rwX {place}\n" in f"{said}\n"
    assert not bob.store.attempt(2).path.exists()
    assert does(BOB, lambda: os.system(f"chmod -R g+rwX {place}") and None) is None
    assert does(ALICE, alice.train) is None


def test_a_folder_in_which_ranks_may_not_save_is_named_before_training(users):
    alice, bob = users
    bob.misfortune(KILLED)
    assert does(BOB, bob.train) == "ended with -9"
    saved = bob.store.checkpoints.resolve()
    saved.chmod(0o2750)
    said = does(ALICE, lambda: call(alice))
    assert f"{bob.store.checkpoints.name}: Permission denied: give this user the right to it" in said
    assert f"with mode drwxr-s---: {BOB} can call chmod -R g+rwX {saved.parent}" in said
    assert alice.attempts == [(0, "interrupted", "lost")] and not bob.store.attempt(2).path.exists()


def test_a_sticky_bit_that_keeps_a_colleague_from_resuming_is_named_with_the_command_that_removes_it(users):
    alice, bob = users
    bob.misfortune(KILLED)
    assert does(BOB, bob.train) == "ended with -9"
    place = bob.store.path.resolve()
    (place / "checkpoints").chmod(0o3770)
    said = does(ALICE, lambda: call(alice))
    saved = alice.store.checkpoints
    sticky = f"{saved} has the sticky bit, so only owners remove or replace files there"
    refused = f"{saved / 'latest_train_state.pt'}: Operation not permitted: {sticky}"
    assert f"{refused}: {BOB} can call chmod -R -t {place}\n" in f"{said}\n"
    assert alice.attempts == [(0, "interrupted", "lost")]
    assert does(BOB, lambda: os.system(f"chmod -R -t {place}") and None) is None
    assert does(ALICE, alice.train) is None


def test_in_a_folder_for_everybody_the_sticky_bit_stays(place):
    place.chmod(0o1777)
    (place / "file").touch(0o600)

    def remove():
        with errors.one_sentence():
            (place / "file").unlink()

    said = does(ALICE, remove)
    assert f"{place} has the sticky bit, so only owners remove or replace files there: ask user root\n" in f"{said}\n"


def test_a_rank_that_does_what_only_a_files_owner_may_is_not_started_again(users):
    alice, bob = users
    theirs = alice.folder.path.parents[3] / "bob's"
    theirs.touch(0o644)
    bob.misfortune(f"step == 3 and os.chmod({str(theirs)!r}, 0)")
    said = does(ALICE, alice.train)
    assert f"no permission: {theirs}: Operation not permitted: only its owner may do this" in said
    assert alice.attempts == [(0, "failed", "no_permission")]


def test_a_rank_that_may_not_use_a_file_is_not_started_again(users):
    alice, bob = users
    secret = alice.folder.path.parents[3] / "secret"
    secret.touch(0o600)
    bob.misfortune(f"step == 3 and open({str(secret)!r})")
    said = does(ALICE, alice.train)
    assert f"no permission: {secret}: Permission denied: give this user the right to it, and call again" in said
    assert "It belongs to user root and group root, with mode -rw-------, in which this user isn't" in said
    assert alice.attempts == [(0, "failed", "no_permission")]


def test_a_call_on_a_finished_run_changes_none_of_its_files(users):
    alice, bob = users
    assert does(ALICE, alice.train, umask=0o002) is None
    before = rights(alice.store.path)
    assert does(BOB, bob.train) is None and completion.finished(bob.folder, bob.store)
    assert bob.folder.train_manifest.exists()
    assert rights(alice.store.path) == before
    assert does(ALICE, alice.train, umask=0o002) is None
    assert alice.attempts == [(0, "completed", None)]


def test_a_payload_of_one_user_is_the_others_too(place):
    shared_folder(place / "store")
    first, second = (place / "store" / "corpora" / "wiki" / name for name in ("abc", "def"))

    def build(final):
        with store.building(final) as partial:
            (partial / "deep").mkdir()
            (partial / "deep" / "file").write_text("x")
            (partial / "deep" / "file").chmod(0o600)  # as safetensors and temporary files are made

    assert does(BOB, lambda: build(first)) is None
    assert does(ALICE, lambda: build(second)) is None, "a lock, and a folder in bob's folder"
    assert closed_to_the_group(place / "store") == []


def test_outside_of_a_shared_folder_the_umask_counts(place):
    own_folder(place / "own", BOB)
    (place / "own").chmod(0o775)  # writable for bob's group, which may be everybody's
    assert does(BOB, lambda: store.building(place / "own" / "a" / "b").__enter__()) is None
    assert stat.S_IMODE((place / "own" / "a").stat().st_mode) == 0o700


def test_one_command_opens_a_whole_payload_and_elsewhere_one_file(place):
    """12 digits are also the name of a job's folder, or of a day."""
    payload, elsewhere = (shared_folder(place / name) / "0123456789ab" for name in ("store", "jobs"))
    secrets = [payload / "facts.json", elsewhere / "plan.tsv"]

    def keeps_for_himself():
        store.building(payload).__enter__()
        for secret in secrets:
            secret.parent.mkdir()
            secret.touch()

    def read(secret):
        with errors.one_sentence():
            secret.open()

    assert does(BOB, keeps_for_himself, umask=0o027) is None
    for secret in secrets:
        secret.chmod(0o600)
    opened, alone = (does(ALICE, lambda: read(secret)) for secret in secrets)  # noqa: B023
    assert f"{BOB} can call chmod -R g+rwX {payload}\n" in f"{opened}\n"
    assert f"{BOB} can call chmod g+rwX {secrets[1]}\n" in f"{alone}\n"


def test_who_can_open_a_folder_is_named_with_the_command(place):
    shared_folder(place / "store")

    def before():
        (place / "store" / "tokenizers").mkdir()

    def refused():
        with contextlib.suppress(OSError), errors.one_sentence():
            store.building(place / "store" / "tokenizers" / "bpe" / "abc").__enter__()

    assert does(BOB, before) is None
    said = does(ALICE, refused)
    folder = place / "store" / "tokenizers"
    assert (
        f"error: {folder}: Permission denied: give this user the right to it, and call again. It belongs to user "
        in said
    )
    assert f"user {BOB} and group {GROUP}, with mode drwx--S---: {BOB} can call chmod g+rwX {folder}" in said
    assert does(BOB, lambda: os.system(f"chmod g+rwX {folder}") and None) is None
    assert does(ALICE, refused) is None
