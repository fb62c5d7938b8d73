"""sweep submit: a sweep's file, or the manifest of one that was run before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from controlplane.cli.common_options import COMMON, Common
from controlplane.cli.submission import Submission, prepared
from controlplane.cli.submit import KEY_HELP, PROJECT_HELP, send
from controlplane.client.jobfile import checked
from controlplane.client.sweeps.manifest import read_manifest
from controlplane.client.sweeps.sweep import stated_sweep
from controlplane.client.workdir_archive import digest_of, pack, survey
from schemas.errors import BadFieldError

SET_HELP = "KEY=VALUE over the file: space.lr=0.1, searcher.max_epochs=3, slots=[1,4]"
MANIFEST_HELP = "of a sweep that was run: the same space, searcher and seed again"
WORKDIR_HELP = "with --manifest: where its functions lie; default: what the cluster has of them"
CHANGED_HELP = "with --workdir: even if its files are not the same any more"


def submit(
    file: Path | None = None,
    /,
    *,
    set_: Annotated[list[str] | None, Parameter(name="--set", help=SET_HELP)] = None,
    manifest: Annotated[Path | None, Parameter(help=MANIFEST_HELP)] = None,
    workdir: Annotated[Path | None, Parameter(help=WORKDIR_HELP)] = None,
    changed: Annotated[bool, Parameter(negative="", help=CHANGED_HELP)] = False,
    wait: Annotated[bool, Parameter(help="until it ends; exit 1 if it fails, and say why")] = False,
    key: Annotated[str | None, Parameter(help=KEY_HELP)] = None,
    project: Annotated[str, Parameter(help=PROJECT_HELP)] = "",
    dry_run: Annotated[bool, Parameter(help="check, say what would go, submit nothing")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], help="ask nothing")] = False,
    common: Common = COMMON,
) -> int:
    """Submit the sweep that FILE (TOML) describes, with a snapshot of its working directory."""
    if (file is None) == (manifest is None):
        raise BadFieldError(
            "give FILE or --manifest, one of both", "see `ones sweep submit --help`"
        )
    if file is not None:
        if workdir is not None or changed:
            raise BadFieldError("--workdir and --changed go with --manifest", "leave them out")
        ready = prepared(file, set_ or ())
        stated_sweep(ready.spec)
    else:
        assert manifest is not None  # noqa: S101 - one of both
        if set_:
            raise BadFieldError("--set goes with FILE", "a manifest is run again as it was", "set")
        ready = from_manifest(manifest, workdir, changed=changed)
    ready = ready._replace(project=project)
    try:
        return send([ready], key=key, wait=wait, dry_run=dry_run, yes=yes, common=common)
    except BadFieldError as error:
        if error.field != "snapshot" or not ready.stored:
            raise
        what = f"the cluster has no snapshot {ready.stored[:12]} any more"
        raise BadFieldError(what, "name a copy of the files with --workdir", "workdir") from None


def from_manifest(file: Path, workdir: Path | None, *, changed: bool) -> Submission:
    """A sweep that was run before, ready to go.

    Args:
        workdir: where its functions lie; None: the cluster has them from then.
        changed: whether that may have changed.

    Raises:
        BadFieldError: if the working directory is not the one of the manifest.
    """
    found = read_manifest(file)
    if workdir is None:
        if changed:
            raise BadFieldError("--changed goes with --workdir", "name the files", "changed")
        return Submission(file, found.spec, (), found.snapshot)
    spec = checked(msgspec.structs.replace(found.spec, workdir=str(workdir)), Path.cwd())
    digest = digest_of(pack(Path(spec.workdir)))
    if digest != found.snapshot and not changed:
        other = f"{digest[:12]}, not {found.snapshot[:12]}"
        what = f"{spec.workdir} is not what {found.job} was run with: {other}"
        hint = "take out what was not there, or accept the difference with --changed"
        raise BadFieldError(what, hint, "workdir")
    return Submission(file, spec, survey(Path(spec.workdir)))
