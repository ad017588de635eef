"""Files from the Hugging Face hub, at a commit that is recorded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megaboa.errors import InputError, led_to
from megaboa.files import digest, folder_digests
from megaboa.records import ExportRecord, Proof

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

# Files of an earlier push. A new one deletes those that it doesn't have, because transformers would read them first.
REPLACED = ["*.safetensors", "*.safetensors.index.json"]
_ID = re.compile(r"[\w.-]+/[\w.-]+")
CLIENTS = ("httpx", "requests")  # HTTP clients of huggingface_hub, since 1.0 and before


def is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None


class HubError(InputError):
    """The hub refuses, or can't be reached. That says nothing about the run, and another call may succeed."""


def download(repo: str, revision: str | None, patterns: list[str], key: str) -> tuple[Path, str]:
    """The folder of a repository's files (from the cache, if they are there), and its commit.

    `key`: the key of the experiment file that names the repository, for error messages.
    """
    from huggingface_hub import errors

    where = f"{key}: {repo!r}" + (f" at revision {revision!r}" if revision else "")
    command = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
    try:
        with reading(where, repo, f" (`{command}`)", ", or name a local folder"):
            folder = Path(_snapshot(repo, revision, patterns))
    except errors.HFValidationError as error:
        raise InputError(f"{where} is neither an existing folder nor a Hugging Face id (`owner/name`)") from error
    # The cache's folder for a snapshot is named after its commit.
    return folder, folder.name


def _snapshot(repo: str, revision: str | None, patterns: list[str]) -> str:
    """Download files. Without an answer from the hub, the cache is used: the client always asks for a list of files
    first, even if all of them are in the cache."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(repo, revision=revision, allow_patterns=patterns)
    except Exception as error:
        if not _without_answer(error):
            raise
        return snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=True)


def require_proven(export: ExportRecord, proof: Proof, manifest: Path, again: str) -> None:
    """Refuse to push unless the files are those that were proved. `again`: the call that pushes."""
    if proof.digest != export.digest:
        raise InputError(f"{manifest}: the proof is of another export: call `{again} --forcerun prove_export`")
    found = folder_digests(export.path)
    changed = sorted(name for name in found.keys() | export.files.keys() if found.get(name) != export.files.get(name))
    if changed or digest(found) != export.digest:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise InputError(
            f"{export.path} is not what was proved: {', '.join(changed[:3])}{more} changed. Edit the files on the hub "
            f"after the push, and have the export made again: `rm -r {export.path} {manifest}`, then `{again}`"
        )


def upload(folder: Path, repo: str, private: bool, message: str, key: str) -> str:
    """Send a folder to a repository, which is made if it isn't there; return the commit."""
    import httpx
    from huggingface_hub import HfApi, errors, get_token

    where = f"{key}: {repo!r}"
    if not get_token():
        raise InputError(f"{where}: no token: set HF_TOKEN to one that may write, or run `hf auth login`")
    try:
        with refusals(where, page=repo):
            api = HfApi()
            api.create_repo(repo, private=private, exist_ok=True)
            if private and not api.model_info(repo).private:
                raise InputError(f"{where} is public, and export.private is true: set it to false, or name another one")
            return api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=REPLACED
            ).oid
    except errors.HFValidationError as error:
        raise InputError(f"{where} is not a Hugging Face id (`owner/name`)") from error
    except ValueError as error:  # the card's head, before anything is sent
        raise InputError(f"{where}: the hub's client refuses it: {' '.join(str(error).split())[:200]}") from error
    except errors.HfHubHTTPError as error:
        raise InputError(_refused(where, error)) from error
    except (errors.OfflineModeIsEnabled, OSError, httpx.HTTPError) as error:
        raise InputError(f"{where}: the hub can't be reached from here: push where there is a network") from error


def _refused(where: str, answer: HfHubHTTPError) -> str:
    said = " ".join(str(answer).split())[:200]
    if answer.response.status_code in (401, 403):
        said = f"check HF_TOKEN, or run `hf auth login` with an account that has access ({said})"
    return f"{where}: the hub refuses it: {said}"


@contextlib.contextmanager
def refusals(where: str, page: str | None) -> Iterator[None]:
    """Turn the hub's own refusals into one-sentence errors. A missing answer is handled elsewhere.

    This also covers libraries (transformers, Bridge) that wrap the hub's answer in an exception of their own.
    """
    from huggingface_hub import errors

    try:
        yield
    except InputError:  # it may have this message already
        raise
    except Exception as error:
        for answer in led_to(error):
            if isinstance(answer, errors.GatedRepoError):
                place = f"at https://huggingface.co/{page}" if page else "on its page"
                raise HubError(
                    f"{where} is gated: ask for access {place}, then set HF_TOKEN or run `hf auth login`"
                ) from error
            if isinstance(answer, errors.RevisionNotFoundError):
                raise InputError(f"{where}: there is no such commit, tag or branch") from error
            if isinstance(answer, errors.RepositoryNotFoundError):
                raise HubError(
                    f"{where} is not on the hub, or is private: check the spelling, set HF_TOKEN or run `hf auth login`"
                ) from error
        raise


@contextlib.contextmanager
def reading(where: str, repo: str | None = None, command: str = "", otherwise: str = "") -> Iterator[None]:
    """Like `refusals`, for files that may be in the cache, and including other reasons why the hub doesn't provide
    them.

    `command`: fetches them on a machine with a network; `otherwise`: another remedy without a network.
    """
    from huggingface_hub import errors

    try:
        with refusals(where, page=repo):
            yield
    except InputError:
        raise
    except Exception as error:
        chain = [*led_to(error)]
        for answer in chain:
            if isinstance(answer, errors.HfHubHTTPError) and not isinstance(answer, errors.EntryNotFoundError):
                raise HubError(_refused(where, answer)) from error
        if any(isinstance(one, errors.LocalEntryNotFoundError) or _without_answer(one) for one in chain):
            raise HubError(
                f"{where} is not in the local cache and the hub can't be reached from here: download it where there "
                f"is a network{command} and share HF_HOME{otherwise}"
            ) from error
        raise


def _without_answer(error: BaseException) -> bool:
    of_client = type(error).__module__.partition(".")[0] in CLIENTS and getattr(error, "response", None) is None
    return of_client or isinstance(error, (ConnectionError, TimeoutError))
