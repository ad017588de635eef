"""sacct's lines. tests/cluster has a real one."""

from megaboa.scheduler.slurm.queue import parse_lives, read_lives


def test_lives_of_a_job_that_was_put_back():
    text = (
        "17|2026-11-20T10:00:00|2026-11-20T10:05:00|2026-11-20T11:00:00\n"
        "17|2026-11-20T11:00:00|2026-11-20T11:30:00|Unknown\n"
        "18|2026-11-20T11:00:00|Unknown|Unknown\n"
        "\n"
    )
    first, second = parse_lives(text, now=2e9)
    assert (first.job, first.start - first.submit, first.end - first.start) == ("17", 300.0, 3300.0)
    assert second.end == 2e9


def test_a_run_without_a_job_needs_no_accounts():
    assert read_lives([]) is None
