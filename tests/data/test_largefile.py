"""Large files: their content, their checksum, and a disk that is full."""

import errno
import hashlib
import random
from pathlib import Path

import pytest

from megaboa.data import largefile
from megaboa.data.largefile import LargeFile


@pytest.mark.parametrize("sent", [1, 5000, 1 << 30])
@pytest.mark.parametrize("hashed", [1, 5000, 1 << 30])
def test_the_file_and_its_checksum_are_those_of_the_pieces_whoever_works_on_them(tmp_path, monkeypatch, sent, hashed):
    monkeypatch.setattr(largefile, "SENT_BYTES", sent)
    monkeypatch.setattr(largefile, "HASHED_BYTES", hashed)
    chance = random.Random(0)
    pieces = [chance.randbytes(chance.choice([0, 1, 4000, 70_000])) for _ in range(60)]
    with LargeFile(tmp_path / "x", hashed=True) as file:
        for piece in pieces:
            file.write(memoryview(piece))
    content = b"".join(pieces)
    assert (tmp_path / "x").read_bytes() == content
    assert file.sha256() == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("sent", [1, 1 << 30])
def test_a_disk_that_takes_no_more_is_never_passed_over(monkeypatch, sent):
    monkeypatch.setattr(largefile, "SENT_BYTES", sent)
    with pytest.raises(OSError) as error, LargeFile(Path("/dev/full"), hashed=True) as file:
        for _ in range(10):
            file.write(bytes(100_000))
    assert error.value.errno == errno.ENOSPC
