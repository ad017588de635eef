"""A command of megaboa, called in this process: a process of its own would import for seconds what is here already."""

from __future__ import annotations

import contextlib
import io
import subprocess

from megaboa.__main__ import main


def called(*words: object) -> subprocess.CompletedProcess[str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                print(code, file=stderr)
                code = 1
    return subprocess.CompletedProcess(words, code or 0, stdout.getvalue(), stderr.getvalue())
