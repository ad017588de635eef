"""What the hub answers, in sentences."""

import base64
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import made
import pytest
from hub_stand_in import ACCEPTED, GATED, serving
from huggingface_hub import errors, hf_hub_download

from megaboa.data import hub
from megaboa.errors import InputError
from megaboa.files import digest, folder_digests
from megaboa.records import Proof


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.GatedRepoError, "x is gated: ask for access at https://huggingface.co/datasets/o/n"),
        (errors.RevisionNotFoundError, "x: there is no such commit, tag or branch"),
        (errors.RepositoryNotFoundError, "x is not on the hub, or is private: check the spelling"),
    ],
)
def test_a_refusal_is_one_sentence(kind, said):
    answer = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
    with pytest.raises(InputError, match=f"^{said}"), hub.refusals("x", page="datasets/o/n"):
        raise kind("no", response=answer)


def test_other_errors_are_left_to_the_caller():
    with pytest.raises(TimeoutError), hub.refusals("x", page="o/n"):
        raise TimeoutError
    with pytest.raises(ZeroDivisionError), hub.reading("x", "o/n"):
        raise ZeroDivisionError


@pytest.fixture
def read(tmp_path):
    """A file of the gated model, by a library that puts what it is told into an exception of its own."""

    def read(url, name="config.json", **given):
        with hub.reading("x", GATED, " (`hf download it`)"):
            try:
                return hf_hub_download(GATED, name, endpoint=url, cache_dir=tmp_path, **given)
            except OSError as error:
                raise ValueError("Failed to load it") from error

    return read


@pytest.mark.parametrize("token", [False, "hf_of_somebody"])
def test_a_model_whose_licence_was_not_accepted(read, token):
    with serving() as url, pytest.raises(hub.HubError) as refused:
        read(url, token=token)
    page = f"https://huggingface.co/{GATED}"
    assert str(refused.value) == f"x is gated: ask for access at {page}, then set HF_TOKEN or run `hf auth login`"


def test_a_file_that_the_hub_does_not_have_is_left_to_the_caller(read):
    with serving() as url:
        assert read(url, token=ACCEPTED)
        with pytest.raises(ValueError, match="Failed to load it"):
            read(url, "weights.bin", token=ACCEPTED)


@pytest.mark.parametrize("given", [{}, {"local_files_only": True}])
def test_a_hub_that_cannot_be_reached(read, given, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client tries again for half a minute
    with pytest.raises(hub.HubError, match=r"^x is not in the local cache and the hub can't be reached from here: "):
        read("http://127.0.0.1:9", **given)


class HubServer:
    """The few answers of the hub that a push of a small folder needs."""

    def __init__(self, private=True, files=(), status=200):
        self.private, self.files = private, files
        self.asked, self.tokens = {}, set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                tree = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in outer.files]
                model = {"sha": "0" * 40, "siblings": [], "id": "o/n", "private": outer.private}
                self.answer(tree if "/tree/" in self.path else model)

            def do_POST(self):
                outer.asked[self.path.split("?")[0]] = self.rfile.read(int(self.headers["Content-Length"])).decode()
                outer.tokens.add(self.headers["Authorization"])
                if self.path.endswith("/preupload/main"):
                    self.answer({"files": [{"path": "README.md", "uploadMode": "regular", "shouldIgnore": False}]})
                elif "/commit/" in self.path:
                    self.answer({"commitUrl": f"{outer.url}/o/n/commit/{'c' * 40}", "commitOid": "c" * 40})
                else:
                    self.answer({"url": f"{outer.url}/o/n", "name": "o/n", "id": "1"})

            def answer(self, value):
                body = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def nobody(monkeypatch, tmp_path):
    """No token, neither in the environment nor in the home folder."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))


def test_only_what_was_proved_is_pushed(tmp_path):
    (tmp_path / "README.md").write_text("a card")
    files = folder_digests(tmp_path)
    export = made.export(path=str(tmp_path), files=files, digest=digest(files))
    proof = Proof(state="PASS", checks=(), digest=export.digest)
    place, again = Path("results/x/runs/a/export.json"), "snakemake push --configfile x.yaml"
    hub.require_proven(export, proof, place, again)
    with pytest.raises(InputError, match=f"^{place}: the proof is of another export: call `{again} --forcerun prove"):
        hub.require_proven(export, replace(proof, digest="2"), place, again)
    (tmp_path / "README.md").write_text("my card")
    with pytest.raises(InputError, match=f"README.md changed.* `rm -r {tmp_path} {place}`, then `{again}`$"):
        hub.require_proven(export, proof, place, again)


def test_nothing_is_pushed_without_a_token(nobody, tmp_path):
    with pytest.raises(InputError, match=r"export.push.a: 'o/n': no token: set HF_TOKEN"):
        hub.upload(tmp_path, "o/n", True, "m", "export.push.a")


def test_a_hub_that_does_not_answer_is_one_sentence(nobody, monkeypatch, tmp_path):
    """Nothing listens on port 9 of this machine."""
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"export.push.a: 'o/n': the hub can't be reached from here"):
        hub.upload(tmp_path, "o/n", True, "m", "export.push.a")


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_refuses_a_model_is_not_said_to_be_out_of_reach(status, nobody, monkeypatch, tmp_path):
    with HubServer(status=status) as server:
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        with pytest.raises(hub.HubError, match=rf"models.a.hf: 'o/n': the hub refuses it: .*{status}") as refused:
            hub.download("o/n", None, ["*.json"], "models.a.hf")
    assert ("check HF_TOKEN" in str(refused.value)) == (status != 500)


@pytest.fixture(params=[True, False], ids=["offline", "no network"])
def cache(request, nobody, monkeypatch, tmp_path):
    """The folder of a repository in the cache of a machine that reaches no hub, whether it was told so or not."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", request.param)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "models--o--n"


@pytest.mark.parametrize("revision", [None, "v1", "c" * 40])
def test_what_is_in_the_cache_needs_no_hub_whatever_its_revision(cache, revision):
    """As an older client of the hub leaves it: without a list of the commit's files."""
    commit = cache / "snapshots" / ("c" * 40)
    (cache / "refs").mkdir(parents=True)
    for branch in ("main", "v1"):
        (cache / "refs" / branch).write_text(commit.name)
    commit.mkdir(parents=True)
    assert hub.download("o/n", revision, ["*.json"], "models.a.hf") == (commit, commit.name)


@pytest.mark.parametrize("revision", [None, "v1", "c" * 40])
def test_what_is_not_in_the_cache_is_one_sentence_that_names_the_revision(cache, revision):
    with pytest.raises(InputError) as error:
        hub.download("o/n", revision, ["*.json"], "models.a.hf")
    command = f"hf download o/n --revision {revision}" if revision else "hf download o/n"
    assert "is not in the local cache and the hub can't be reached" in str(error.value)
    assert f"(`{command}`)" in str(error.value)


def test_a_folder_is_sent_to_a_hub(nobody, monkeypatch, tmp_path):
    """To a server on this machine that answers as the hub does: no hub can be reached in a test."""
    (tmp_path / "README.md").write_text("# a model\n")
    with HubServer(files=["model.safetensors", "notes.md"]) as server:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        assert hub.upload(tmp_path, "o/n", True, "run a, iteration 6", "export.push.a") == "c" * 40
    created, committed = server.asked["/api/repos/create"], server.asked["/api/models/o/n/commit/main"]
    assert json.loads(created)["visibility"] == "private"
    lines = [json.loads(line) for line in committed.splitlines()]
    assert lines[0]["value"]["summary"] == "run a, iteration 6"
    contents = {line["value"]["path"]: line["value"].get("content") for line in lines[1:]}
    assert base64.b64decode(contents.pop("README.md")) == b"# a model\n"
    assert contents == {"model.safetensors": None}, "weights of an earlier push go, and nothing else"
    assert {line["key"] for line in lines[1:]} == {"file", "deletedFile"}
    assert server.tokens == {"Bearer hf_secret"}


def test_a_public_repository_is_not_taken_for_a_private_one(nobody, monkeypatch, tmp_path):
    with HubServer(private=False) as server:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        with pytest.raises(InputError, match=r"'o/n' is public, and export.private is true"):
            hub.upload(tmp_path, "o/n", True, "m", "export.push.a")
    assert not any("/commit/" in path for path in server.asked)
