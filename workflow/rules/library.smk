# Finds the library: next to these rules. For a module that Snakemake reads from a repository, file by file, clone it
# first.
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def checked_out(source):
    """A clone of the repository of one of Snakemake's source files, at that file's commit."""
    repository = getattr(source, "repo_path", None) or source.hosted_repo.repo_clone
    commit = git(repository, "rev-parse", "--verify", f"{source.ref}^{{commit}}")
    clones = Path(".snakemake", "megaboa")
    clone = clones / commit
    if not clone.exists():
        clones.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=clones) as folder:
            git(folder, "clone", "--quiet", "--no-checkout", str(repository), "made")
            git(f"{folder}/made", "checkout", "--quiet", commit)
            try:
                os.rename(f"{folder}/made", clone)
            except OSError:  # another process was faster
                if not clone.exists():
                    raise
    return clone


def git(folder, *words):
    return subprocess.check_output(["git", "-C", folder, *words], text=True).strip()


IS_MODULE = not workflow.modifier.is_main_snakefile()
RULE_NAME = workflow.modifier.modify_rulename  # modules' rules may get other names
HERE = workflow.current_basedir  # workflow/rules
HOME = (
    checked_out(HERE)
    if hasattr(HERE, "ref")
    else Path(HERE.get_path_or_uri(secret_free=True)).parents[1]
)
SCRIPTS = os.path.relpath(HOME / "workflow" / "scripts")
CAPTIONS = os.path.relpath(HOME / "workflow" / "report" / "captions.yaml")
sys.path.insert(0, os.path.abspath(SCRIPTS))
