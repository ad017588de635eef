"""Files from the Hugging Face hub, at a commit that is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megaboa.errors import InputError
from megaboa.files import digest, folder_digests
from megaboa.records import ExportRecord, Proof

# Files of an earlier push that this one may not have: transformers would read them first.
REPLACED = ["*.safetensors", "*.safetensors.index.json"]


def download(repo: str, revision: str | None, patterns: list[str], key: str) -> tuple[Path, str]:
    """The folder of a repository's files (from the cache, where they are there already) and its commit.

    `key` is the key of the experiment file that named the repository: errors name it.
    """
    from huggingface_hub import errors, snapshot_download

    where = f"{key}: {repo!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        with refusals(where, page=repo):
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except errors.HFValidationError as error:
        raise InputError(f"{where} is neither an existing folder nor a Hugging Face id (`owner/name`)") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, OSError) as error:
        for answer in (error, error.__cause__):
            if isinstance(answer, errors.HfHubHTTPError):
                raise InputError(_refused(where, answer)) from error
        raise InputError(
            f"{where} is not in the local cache and the hub can't be reached from here: download it where there is "
            f"a network (`hf download {repo}`) and share HF_HOME, or name a local folder"
        ) from error
    # The cache keeps a snapshot in a folder that is called after its commit.
    return folder, folder.name


def require_proven(export: ExportRecord, proof: Proof) -> None:
    """Push only proved files."""
    if proof.digest != export.digest or digest(folder_digests(export.path)) != export.digest:
        raise InputError(f"{export.path} is not what was proved: call `snakemake export --forcerun prove_export`")


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


def _refused(where: str, error: Exception) -> str:
    return f"{where}: the hub refuses it: {' '.join(str(error).split())[:200]}"


@contextlib.contextmanager
def refusals(where: str, page: str) -> Iterator[None]:
    """What the hub itself answers, in a sentence; that it doesn't answer is another matter."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(
            f"{where} is gated: ask for access at https://huggingface.co/{page}, then run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{where}: there is no such commit, tag or branch") from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{where} is not on the hub, or is private: check the spelling, or run `hf auth login`"
        ) from error
