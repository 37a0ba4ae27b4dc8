"""`vitral push`."""

from __future__ import annotations

from typing import Annotated

from vitral.cli.options import Format, Help
from vitral.cli.output import print_json, print_text, say
from vitral.errors import UsageError


def push(
    run: Annotated[str, Help("finished run", "RUN")],
    repository: Annotated[str, Help("repository on huggingface.co, created if it does not exist", "ORG/NAME")],
    *,
    license: Annotated[str | None, Help("license, such as mit or apache-2.0; you must choose one")] = None,
    private: Annotated[bool, Help("create a repository that others do not see")] = False,
    dry_run: Annotated[bool, Help("write the files into --out, and upload nothing")] = False,
    out: Annotated[str | None, Help("folder of a dry run")] = None,
    format: Format = "text",
) -> int:
    """Publish a run on the Hugging Face hub: weights for transformers, and a model card with what was measured."""
    from vitral.workflows.push import prepare
    from vitral.workflows.push import push as upload

    target = f"--dry-run --out {out or 'FOLDER'}" if dry_run or out is not None else ""
    full = f"vitral push {run} {repository} --license {license or 'LICENSE'} {target}".rstrip()
    if license is None:
        why = "others may use what you publish only under its license: mit, apache-2.0, cc-by-4.0, other …"
        raise UsageError("a license is needed", why=why, hint=full)
    if dry_run != (out is not None):
        raise UsageError("--dry-run and --out go together", hint=full)
    if out is not None:
        pushed = prepare(run, repository, out, license=license)
    else:
        pushed = upload(run, repository, license=license, private=private)
    if format == "json":
        print_json(pushed.to_json())
        return 0
    if pushed.reason:
        say(f"note: the weights are in vitral's layout; {pushed.reason}")
    print_text(f"{'wrote' if pushed.folder else 'uploaded'} {', '.join(pushed.files)}")
    say(f"Folder   {pushed.folder}" if pushed.folder else f"Page     {pushed.url}")
    return 0
