"""TensorBoard's event files, as PyTorch's writer writes them for Bridge."""

import pytest
from torch.utils.tensorboard import SummaryWriter

from megaboa.observe.logs.events import Steps
from megaboa.observe.logs.log_summary import LogSummary
from megaboa.observe.logs.tensorboard import event_files, is_event_file, read_event_file
from megaboa.records import plain


def write(folder, steps):
    """The tags of megatron.bridge.training.utils.train_utils, in its order."""
    with SummaryWriter(str(folder)) as writer:
        for step in steps:
            writer.add_scalar("learning-rate", 3e-4, step)
            writer.add_scalar("learning-rate vs samples", 3e-4, step * 8)
            writer.add_scalar("batch-size", 8, step)
            writer.add_scalar("lm loss", 10.0 - step / 8, step)
            writer.add_scalar("lm loss vs samples", 10.0 - step / 8, step * 8)
            writer.add_scalar("grad-norm", 1.25, step)
            writer.add_scalar("iteration-time", 0.5, step)
            if step % 5 == 0:
                writer.add_scalar("lm loss validation", 9.0, step)
                writer.add_scalar("lm loss validation vs samples", 9.0, step * 8)
    return event_files(folder)


def summary_of(*files):
    summary = LogSummary()
    for file in files:
        summary.read(read_event_file(file))
    return plain(summary.summarize(seq_length=64))


def test_the_steps_of_an_event_file(tmp_path):
    (file,) = write(tmp_path, range(1, 11))
    assert is_event_file(file)
    summary = summary_of(file)
    assert (summary["steps"]["printed"], summary["loss"]["last"], summary["loss"]["first"]) == (10, 8.75, 9.875)
    assert summary["step_seconds"]["median"] == 0.5 and summary["tokens_per_second"]["median"] == 8 * 64 / 0.5
    assert [note["step"] for note in summary["validation"]] == [5, 10]


def test_one_file_for_every_attempt(tmp_path):
    files = [*write(tmp_path / "1", range(1, 11)), *write(tmp_path / "2", range(8, 16))]
    summary = summary_of(*files)
    assert (summary["attempts"], summary["steps"]["printed"], summary["steps"]["replayed"]) == (2, 15, 3)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_torn_has_fewer_steps_and_no_wrong_ones(tmp_path, share):
    (file,) = write(tmp_path / "whole", range(1, 11))
    whole = {row[0]: row[1] for event in read_event_file(file) if isinstance(event, Steps) for row in event.rows()}
    torn = tmp_path / file.name
    torn.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    for event in read_event_file(torn):
        if isinstance(event, Steps):
            for step, fields in event.rows():
                assert fields.items() <= whole[step].items()
