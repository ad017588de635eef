"""Send a proven export to a repository of the Hugging Face hub; the token comes from the environment alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaboa.data import hub
from megaboa.errors import InputError, one_sentence
from megaboa.files import digest, folder_digests, write_json
from megaboa.records import ExportRecord, Proof, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", required=True, type=Path, help="export.json of the run")
    parser.add_argument("--proof", required=True, type=Path, help="proof.json of the export")
    parser.add_argument("--repository", required=True, help="owner/name")
    parser.add_argument("--private", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    export, proof = read(ExportRecord, args.export), read(Proof, args.proof)
    if proof.digest != export.digest or digest(folder_digests(export.path)) != export.digest:
        raise InputError(f"{export.path} is not what was proved: call `snakemake export --forcerun prove_export`")
    print(f"pushing {export.path} to {args.repository}", flush=True)
    what = f"{export.run}, iteration {export.iteration}"
    commit = hub.upload(Path(export.path), args.repository, args.private, what, f"export.push.{export.run}")
    write_json(args.out, {"repository": args.repository, "commit": commit, "digest": export.digest})
    print(f"pushed as commit {commit}")


if __name__ == "__main__":
    with one_sentence():
        main()
