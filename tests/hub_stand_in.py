"""A server on this machine that answers as the hub does: for one dataset (a script, and its branch of Parquet files),
and for one gated model, of which it gives `config.json` to a token whose owner has accepted the licence."""

import contextlib
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlparse

import pyarrow as pa
import pyarrow.parquet as pq

NAME = "stas/openwebtext-10k"
MAIN, PARQUET = "a" * 40, "b" * 40
REVISIONS = {"main": MAIN, "refs/convert/parquet": PARQUET, MAIN: MAIN, PARQUET: PARQUET}
API, FILES = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"
GATED, ACCEPTED = "meta-llama/Meta-Llama-3-8B", "hf_accepted"
CONFIGS = Path(__file__).parent / "fixtures" / "hf_configs.json"


def table(columns):
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


def trees(subsets, rows=None):
    """The files of both branches, by commit; `rows`: columns other than the texts that a subset has."""
    script = {"openwebtext-10k.py": b"import datasets\n", "README.md": b"# a dataset\n"}
    texts = {name: rows or {"text": [f"{name} {row}" for row in range(20)]} for name in subsets}
    tables = {f"{name}/train/0000.parquet": table(columns) for name, columns in texts.items()}
    return {MAIN: script, PARQUET: tables}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    files: ClassVar = {}

    def do_GET(self):
        url = urlparse(self.path)
        path = unquote(url.path)
        if path == API or path.startswith(f"{API}/revision/"):
            self.describe(path.removeprefix(API).removeprefix("/revision/") or "main")
        elif path.startswith(f"{API}/tree/"):
            commit, _, folder = path.removeprefix(f"{API}/tree/").partition("/")
            self.list(commit, folder, "recursive=true" in url.query.lower())
        elif path.startswith(FILES):
            commit, _, name = path.removeprefix(FILES).partition("/")
            self.send(commit, name)
        elif path.startswith(f"/{GATED}/resolve/"):
            self.send_gated(path.rpartition("/")[2])
        elif path.startswith("/api/datasets/"):
            self.answer(401, b"{}")
        else:
            self.answer(404, b"{}")

    do_HEAD = do_GET  # noqa: N815

    def describe(self, revision):
        if revision not in REVISIONS:
            self.answer(404, b"{}", X_Error_Code="RevisionNotFound")
            return
        commit = REVISIONS[revision]
        siblings = [{"rfilename": name} for name in self.files[commit]]
        self.answer(200, json.dumps({"id": NAME, "sha": commit, "siblings": siblings}).encode())

    def list(self, commit, folder, recursive):
        found = {}
        for name, content in self.files[commit].items():
            if folder and not name.startswith(f"{folder}/"):
                continue
            parts = name.split("/")
            depth = len(folder.split("/")) if folder else 0
            for end in range(depth + 1, len(parts) + 1 if recursive else depth + 2):
                file = {"type": "file", "size": len(content), "oid": "0" * 40}
                kind = file if end == len(parts) else {"type": "directory", "oid": "1" * 40}
                found["/".join(parts[:end])] = kind
        if folder and not found:
            self.answer(404, b"{}", X_Error_Code="EntryNotFound")
        else:
            entries = [{"path": path, "size": 0, **kind} for path, kind in found.items()]
            self.answer(200, json.dumps(entries).encode())

    def send_gated(self, name):
        """401 to nobody, 403 to a token of somebody else."""
        token = self.headers.get("Authorization")
        if token != f"Bearer {ACCEPTED}":
            said = f"Access to model {GATED} is restricted."
            self.answer(403 if token else 401, said.encode(), X_Error_Code="GatedRepo", X_Error_Message=said)
            return
        config = json.loads(CONFIGS.read_text())[GATED]
        self.give(MAIN, json.dumps(config).encode() if name == "config.json" else None)

    def send(self, commit, name):
        self.give(commit, self.files[commit].get(name))

    def give(self, commit, content):
        if content is None:
            self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        elif (wanted := self.headers.get("Range")) and self.command == "GET":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1 if last else None]
            span = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            self.answer(206, part, ETag='"x"', X_Repo_Commit=commit, Content_Range=span)
        else:
            self.answer(200, content, ETag='"x"', X_Repo_Commit=commit, Accept_Ranges="bytes")

    def answer(self, code, body, **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(*subsets, rows=None):
    """The address of a hub whose dataset has these subsets."""
    handler = type("Dataset", (Handler,), {"files": trees(subsets, rows)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
