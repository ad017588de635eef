"""Small corpora for tests, written by the library's own index and numpy."""

import numpy as np

from megaboa.data.indexed import write_index


def write_indexed(prefix, documents, dtype=np.uint16):
    """`<prefix>.bin` and `.idx` of lists of token ids; return the number of tokens."""
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(np.array(ids, dtype).tobytes() for ids in documents))
    lengths = np.array([len(ids) for ids in documents], np.int32)
    write_index(prefix.with_name(f"{prefix.name}.idx"), np.dtype(dtype), lambda: iter([lengths]))
    return int(lengths.sum())
