import pytest

from megaboa.files import read_json
from megaboa.run import checkpoints


def save(root, iteration, complete=True):
    checkpoints.folder(root, iteration).mkdir(parents=True)
    if complete:
        (checkpoints.folder(root, iteration) / checkpoints.LAST_WRITTEN).touch()
        checkpoints.mark_complete(root)


def test_only_marked_checkpoints_count(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    save(tmp_path, 30, complete=False)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    assert checkpoints.complete_iterations(tmp_path) == [10, 20]
    assert checkpoints.latest(tmp_path) == 20


def test_a_save_in_the_background_is_marked_when_it_is_over_and_no_folder_is_invented(tmp_path):
    save(tmp_path, 100, complete=False)
    checkpoints.mark_complete(tmp_path)
    assert checkpoints.latest(tmp_path) == 0
    (checkpoints.folder(tmp_path, 100) / checkpoints.LAST_WRITTEN).touch()
    checkpoints.mark_complete(tmp_path)
    assert checkpoints.complete_iterations(tmp_path) == [100]


def test_nothing_saved_yet(tmp_path):
    assert checkpoints.latest(tmp_path / "missing") == 0
    assert checkpoints.remove_unfinished(tmp_path / "missing") == []


def test_iterations_of_any_length(tmp_path):
    save(tmp_path, 9_999_999)
    save(tmp_path, 12_345_678)
    assert checkpoints.latest(tmp_path) == 12_345_678


def test_unfinished_saves_are_removed_and_nothing_else(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20, complete=False)
    (tmp_path / "notes").mkdir()
    assert checkpoints.remove_unfinished(tmp_path) == [checkpoints.folder(tmp_path, 20)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000010", "notes"]


# Checksums


def save_tensors(root, iteration):
    folder = checkpoints.folder(root, iteration)
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", "tokenizer/vocab.json", checkpoints.LAST_WRITTEN):
        (folder / name).write_text(f"{iteration} {name} " * 100)
    checkpoints.mark_complete(root)
    return folder


def test_a_checkpoint_is_as_it_was_written(tmp_path):
    folder = save_tensors(tmp_path, 10)
    assert checkpoints.damage(tmp_path, 10) is None  # nothing is known yet
    checkpoints.add_digests(tmp_path, 10)
    assert checkpoints.damage(tmp_path, 10) is None
    known = read_json(folder / checkpoints.DIGESTS)
    assert sorted(known) == ["__0_0.distcp", "__1_0.distcp", checkpoints.LAST_WRITTEN, "tokenizer/vocab.json"]


def change(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (change, "has changed since it was written"),
        (truncate, "has changed since it was written"),
        (empty, "has changed since it was written"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["__1_0.distcp", "tokenizer/vocab.json"])
def test_damage_is_found_and_named(tmp_path, harm, said, name):
    folder = save_tensors(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    harm(folder / name)
    assert checkpoints.damage(tmp_path, 10) == f"{folder / name} {said}"


def test_files_that_came_later_are_no_damage(tmp_path):
    folder = save_tensors(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    (folder / "notes.txt").write_text("mine")
    assert checkpoints.damage(tmp_path, 10) is None


def test_checksums_are_written_once_so_that_damage_is_not_taken_for_content(tmp_path):
    folder = save_tensors(tmp_path, 10)
    checkpoints.add_digests(tmp_path, 10)
    change(folder / "__0_0.distcp")
    checkpoints.add_digests(tmp_path, 10)
    assert checkpoints.damage(tmp_path, 10) == f"{folder / '__0_0.distcp'} has changed since it was written"


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_counts(tmp_path):
    save_tensors(tmp_path, 10)
    folder = save_tensors(tmp_path, 20)
    aside = checkpoints.distrust(tmp_path, 20)
    assert not folder.exists() and (aside / "__0_0.distcp").exists() and aside.parent == tmp_path
    assert checkpoints.complete_iterations(tmp_path) == [10]
    assert checkpoints.remove_unfinished(tmp_path) == [] and aside.exists()


def test_a_checkpoint_can_be_damaged_again(tmp_path):
    for content in ("first", "second"):
        (save_tensors(tmp_path, 20) / "__0_0.distcp").write_text(content)
        aside = checkpoints.distrust(tmp_path, 20)
    assert (aside / "__0_0.distcp").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == [aside.name]
