"""`ones admin` and `ones config check`: commands that read local journals and settings files."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from cyclopts import App, Parameter

from controlplane.cli.output import COMMON, Common, Exit, print_data, say
from controlplane.cli.progress import progress
from controlplane.client.connection import CONTROLLER_FILE, home_folder
from controlplane.client.formats import moment
from controlplane.journal.backup import accept_loss, back_up, compact, problems, restore
from controlplane.journal.mark import losses
from controlplane.journal.reader import Reader
from controlplane.journal.retention import Retention
from controlplane.service import settings_check as of_controller
from controlplane.service.full_backup import back_up_all, is_full_backup, restore_all
from controlplane.service.settings import ControllerSettings, JournalSettings, load
from controlplane.service.standby.lease import LeaseStore, Record
from controlplane.service.standby.lease_stores import open_store
from nodeagent import settings_check as of_agent
from nodeagent.settings import AgentSettings
from schemas.errors import SettingsError, UnavailableError
from schemas.host.settings import read_toml
from schemas.ids import Seconds
from schemas.jobs import JobSpec
from schemas.transport.keys import load_keys, load_public, next_key_path, write_keys

T = TypeVar("T")
JOURNAL: Final = "journal.sqlite"
WHERE: Final = "controller.toml, state folder or journal (default: of the cluster in --home)"
Where = Annotated[Path | None, Parameter(name="--of", help=WHERE)]
Force = Annotated[bool, Parameter(help="replace an existing file")]

admin = App(
    name="admin", help="Back up, restore, check and read the controller's journal, on its host."
)


@admin.command(name="backup")
def backup(
    file: Annotated[Path, Parameter(help="new file; with --all also a folder for it")],
    *,
    of: Where = None,
    all_: Annotated[
        bool,
        Parameter(
            name="--all",
            help="one tar file with settings, keys, journal and working directories",
        ),
    ] = False,
    keep: Annotated[
        int, Parameter(help="with --all: number of backups that stay in the folder (default: all)")
    ] = 0,
    force: Force = False,
    common: Common = COMMON,
) -> int:
    """Copy the journal to FILE in a consistent state; the controller may be running."""
    if all_:
        settings = _config(of, common)
        with progress(common.output, "copying the state"):
            file = back_up_all(settings, file, keep=keep, force=force)
        said = {"settings": str(settings)}
    else:
        journal, _ = _journal(of, common)
        with progress(common.output, "copying the journal"):
            back_up(journal, file, force=force)
        said = {"journal": str(journal)}
    _say(common, {**said, "file": str(file), "bytes": file.stat().st_size})
    return Exit.OK


@admin.command(name="restore")
def restore_journal(
    file: Path, *, of: Where = None, force: Force = False, common: Common = COMMON
) -> int:
    """Replace the journal with FILE, and keep the old journal; stop the controller first.

    A FILE of `backup --all` is restored into an empty folder instead.
    """
    if is_full_backup(file):
        with progress(common.output, "restoring the state"):
            settings = restore_all(file, _config(of, common, must_exist=False).parent)
        _say(common, {"settings": str(settings)})
        return Exit.OK
    journal, _ = _journal(of, common, must_exist=False)
    with progress(common.output, "restoring the journal"):
        kept = restore(file, journal, force=force)
    _say(common, {"journal": str(journal), "former": str(kept or "none")})
    return Exit.OK


@admin.command(name="rotate-key")
def rotate_key(
    *,
    of: Annotated[
        Path | None, Parameter(help="controller.toml or its folder (default: --home)")
    ] = None,
    finish: Annotated[bool, Parameter(help="use the next key from the next start on")] = False,
    common: Common = COMMON,
) -> None:
    """Make the controller's next key pair; with --finish, put it in the place of the current one.

    Reload the controller in between, so that connected nodes and clients learn the next key.
    """
    config = _config(of, common)
    path = config.parent / load(config).keys.server
    if path.suffix != ".key_secret":
        hint = "name the file NAME.key_secret, with its public key in NAME.key"
        raise SettingsError(f"keys.server: {path} cannot be replaced", hint, "keys.server")
    following = next_key_path(path)
    if not finish:
        if not following.exists():
            write_keys(path.parent, following.stem)
        then = "reload the controller (SIGHUP), then use --finish and restart it"
        public = load_public(following).decode()
        _say(common, {"next": str(following), "public": public, "then": then})
        return
    load_keys(following)
    for suffix in (".key", path.suffix):  # the secret key last, so that a crash can be repeated
        one, fresh = path.with_suffix(suffix), following.with_suffix(suffix)
        if fresh.exists():
            if one.exists():
                one.replace(path.with_name(f"{path.stem}-old{suffix}"))
            fresh.replace(one)
    _say(common, {"key": str(path), "then": "restart the controller"})


standby = App(name="standby", help="Show who holds the lease of several controllers, and move it.")
admin.command(standby)


@standby.command(name="status")
def standby_status(*, of: Where = None, common: Common = COMMON) -> int:
    """Show the lease: its holder, its term, and the controllers that have all inputs."""
    settings, store = _lease(of, common)
    held = asyncio.run(_with(store, store.read()))
    record = held.record
    said = {
        "cluster": settings.standby.cluster,
        "active": record.holder if not held.expired else "",
        "holder": record.holder,
        "term": record.term,
        "complete": list(record.complete),
        "incomplete": [host for host in settings.standby.hosts if host not in record.complete],
    }
    _say(common, said)
    return Exit.OK


@standby.command(name="promote")
def standby_promote(
    *,
    of: Where = None,
    accept_loss: Annotated[
        bool, Parameter(help="even without inputs that only a lost controller has")
    ] = False,
    common: Common = COMMON,
) -> int:
    """Let the controller of this host become the active one; run it on the standby's host."""
    settings, store = _lease(of, common)
    host = settings.listen.host

    async def promote() -> Record:
        held = await store.read()
        record = msgspec.structs.replace(held.record, successor=host)
        if record.holder == host and not held.expired:
            raise SettingsError(f"{host} is the active controller", "run this on a standby")
        if host not in record.complete:
            if not accept_loss:
                what = f"{host} lacks inputs that {' and '.join(record.complete)} acknowledged"
                hint = "wait until it has followed, or use --accept-loss if they are lost for good"
                raise SettingsError(what, hint)
            if not held.expired:
                raise SettingsError(f"{record.holder} is active", "stop it first")
            record = msgspec.structs.replace(record, complete=(host,))
        if await store.replace(held.version, record, settings.standby.lease_s) is None:
            raise UnavailableError("the lease changed meanwhile", "try again")
        return record

    record = asyncio.run(_with(store, promote()))
    _say(common, {"successor": host, "former": record.holder, "complete": list(record.complete)})
    return Exit.OK


def _lease(of: Path | None, common: Common) -> tuple[ControllerSettings, LeaseStore]:
    """Return the settings of a controller, and the store of its lease."""
    path = _config(of, common)
    settings = load(path)
    if not settings.standby.lease:
        raise SettingsError(f"{path} has no standby.lease", "there is one controller only")
    return settings, open_store(settings.standby.lease, settings.standby.cluster, path.parent)


async def _with(store: LeaseStore, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    finally:
        await store.close()


@admin.command(name="accept-loss")
def accept_lost_inputs(*, of: Where = None, common: Common = COMMON) -> int:
    """Continue with what a damaged or missing journal still has; the controller must be stopped."""
    journal, _ = _journal(of, common, must_exist=False)
    with progress(common.output, "reading the journal"):
        lost, kept = accept_loss(journal)
    said = {"journal": str(journal), "lost": lost, "former": str(kept or "none")}
    text = [*(lost or ["nothing was lost"]), f"former journal: {kept or 'none'}"]
    say(common, said, *text, quiet=text)
    return Exit.OK


@admin.command(name="check")
def check(*, of: Where = None, common: Common = COMMON) -> int:
    """Check the journal's pages, checksums and snapshots, and whether a replay agrees with them."""
    journal, _ = _journal(of, common)
    with progress(common.output, "checking the journal"):
        lost = list(losses(journal))
    replaying = progress(common.output, "replaying the journal")
    with replaying, contextlib.closing(Reader(journal)) as reader:
        found = [*lost, *problems(reader)]
        first, last = reader.first_and_last()
        snapshots = [snapshot.input for snapshot in reader.snapshots()]
        first_event = reader.first_event()
    said: dict[str, Any] = {
        "journal": str(journal),
        "inputs": [first, last],
        "first_event": first_event,
        "snapshots": snapshots,
        "problems": found,
    }
    head = f"{journal}: inputs {first} to {last}, events from {first_event}"
    text = [
        f"{head} on, snapshots after {', '.join(map(str, snapshots)) or 'none'}",
        *(found or ["no problems"]),
    ]
    say(common, said, *text, quiet=text)
    return Exit.JOB_FAILED if found else Exit.OK


@admin.command(name="compact")
def compact_journal(*, of: Where = None, common: Common = COMMON) -> int:
    """Delete records that exceed the retention, and shrink the file; stop the controller first."""
    journal, settings = _journal(of, common)
    keep = Retention(
        inputs_s=settings.keep_inputs_s,
        events_s=settings.keep_events_s,
        jobs_s=settings.keep_jobs_s,
        used_bytes=settings.keep_bytes,
    )
    with progress(common.output, "rewriting the journal"):
        before, after = compact(journal, keep, Seconds(time.time()))
    _say(common, {"journal": str(journal), "bytes_before": before, "bytes": after})
    return Exit.OK


@admin.command(name="decode")
def decode(
    *,
    of: Where = None,
    from_: Annotated[int, Parameter(name="--from", help="number of the first input")] = 1,
    to: Annotated[
        int | None, Parameter(help="number of the last input (default: the newest)")
    ] = None,
    job: Annotated[str | None, Parameter(help="only inputs that mention this job")] = None,
    common: Common = COMMON,
) -> int:
    """Print the inputs in the journal as JSON, one per line, or as one document with `-o json`."""
    journal, _ = _journal(of, common)
    with contextlib.closing(Reader(journal)) as reader:
        first = max(from_, reader.first_and_last()[0])
        inputs = (
            {"input": number, "at": at, "time": moment(at), **said}
            for number, at, event in reader.numbered_inputs(first - 1, to)
            if (said := msgspec.to_builtins(event)) and (job is None or job in _names(said))
        )
        print_data(inputs, "json" if common.output == "json" else "jsonl")
    return Exit.OK


def _names(said: Any) -> Iterator[str]:
    """Yield every string and key in a message, and the JOB of a worker's name such as `JOB.v2`."""
    if isinstance(said, str):
        yield said
        yield said.rpartition(".v")[0]
    elif isinstance(said, dict):
        for key, value in said.items():
            yield from _names(key)
            yield from _names(value)
    elif isinstance(said, list | tuple):
        for value in said:
            yield from _names(value)


def _journal(
    where: Path | None, common: Common, *, must_exist: bool = True
) -> tuple[Path, JournalSettings]:
    home = home_folder(common.home)
    path, settings = where if where is not None else home / CONTROLLER_FILE, ControllerSettings()
    if path.suffix == ".toml":
        settings = load(path)
        path = path.parent / settings.state / JOURNAL
    elif path.is_dir():
        path /= JOURNAL
    if must_exist and not path.is_file():
        raise SettingsError(f"{path}: no journal", f"--of: {WHERE}", "of")
    return path, settings.journal


def _config(where: Path | None, common: Common, *, must_exist: bool = True) -> Path:
    """Return the path of the selected controller's settings."""
    path = (where if where is not None else home_folder(common.home)).absolute()
    if path.suffix != ".toml":
        path /= CONTROLLER_FILE
    if must_exist and not path.is_file():
        raise SettingsError(f"{path}: no settings", "--of: controller.toml or its folder", "of")
    return path


def _say(common: Common, said: dict[str, Any]) -> None:
    say(common, said, ", ".join(f"{key} {value}" for key, value in said.items()))


ARTICLES: Final = {"controller": "a", "agent": "an"}
Kind = Literal["controller", "agent"]
CHECKS: Final[Mapping[str, tuple[Any, Callable[[Path], list[SettingsError]]]]] = {
    "controller": (ControllerSettings, of_controller.check),
    "agent": (AgentSettings, of_agent.check),
}


def check_settings(
    file: Annotated[Path, Parameter(help="settings file of a controller or an agent")],
    *,
    kind: Annotated[
        Kind | None, Parameter(help="daemon of the file (default: guessed from its keys)")
    ] = None,
    common: Common = COMMON,
) -> int:
    """Print every problem of a settings file on this host; exit with code 2 if there are any."""
    path = file.expanduser().resolve()
    daemon = kind or _kind_of(path)
    problems = CHECKS[daemon][1](path)
    rows = [{"field": p.field, "problem": p.message, "remedy": p.hint} for p in problems]
    lines = [f"{path}: {str(problem).removeprefix(f'{path}: ')}" for problem in problems]
    valid = f"{path}: valid settings of {ARTICLES[daemon]} {daemon}"
    row = {"file": str(path), "kind": daemon, "problems": rows}
    say(common, row, *(lines or [valid]), quiet=lines)
    return Exit.USAGE if problems else Exit.OK


SAMPLES: Final = resources.files("controlplane.cli") / "samples"


def sample(
    name: Annotated[
        str, Parameter(help="controller, agent, client, or a unit such as ones-agent.service")
    ] = "",
    /,
    *,
    into: Annotated[Path | None, Parameter(help="folder for all files; none is replaced")] = None,
    common: Common = COMMON,
) -> int:
    """Print a commented settings file or systemd unit; without NAME, list or write all of them."""
    files = {one.name: one for one in sorted(SAMPLES.iterdir(), key=lambda one: one.name)}
    if into is None and not name:
        say(common, [*files], *files, quiet=files)
        return Exit.OK
    if into is None:
        chosen = name if name in files else f"{name}.toml"
        if chosen not in files:
            raise SettingsError(f"no sample {name!r}", f"choose one of {', '.join(files)}", "name")
        sys.stdout.write(files[chosen].read_text(encoding="utf-8"))
        return Exit.OK
    if there := [str(into / one) for one in files if (into / one).exists()]:
        raise SettingsError(f"{there[0]} exists", "choose another folder", "into")
    into.mkdir(parents=True, exist_ok=True)
    for one, file in files.items():
        (into / one).write_bytes(file.read_bytes())
    say(common, {"folder": str(into), "files": [*files]}, *files, quiet=files)
    return Exit.OK


def _kind_of(path: Path) -> str:
    keys = read_toml(path).keys()
    structs = {kind: struct for kind, (struct, _) in CHECKS.items()} | {"job": JobSpec}
    best = max(structs, key=lambda kind: len({*structs[kind].__struct_fields__} & keys))
    if best == "job":
        remedy = f"`ones submit {path} --dry-run` checks it"
        raise SettingsError(f"{path} is a job file, not a daemon's settings", remedy, "file")
    return best
