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
