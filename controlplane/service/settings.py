"""Settings of the controller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec

from schemas.errors import SettingsError
from schemas.host import settings
from schemas.host.archives import ArchiveBounds
from schemas.sharing import Sharing, problems

DAY_S: Final = 86_400.0
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Bytes = Annotated[int, msgspec.Meta(ge=0)]
Interval = Annotated[float, msgspec.Meta(gt=0)]


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses of the controller. Every ZeroMQ socket requires a key."""

    host: str = "127.0.0.1"  # address of this host
    events: Port = 7700  # events of agents of earlier releases
    agents: Port = 7701  # conversation with agents, and their events
    clients: Port = 7702  # requests of clients
    feed: Port = 7703  # feed of events to clients
    shippers: Port = 7704  # output and files from agents
    followers: Port = 7705  # output and files to clients
    metrics: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 9464  # HTTP, for Prometheus; 0: off


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Key files, relative to the settings file."""

    server: str = "keys/server.key_secret"  # secret key of the controller
    authorised: str = "keys/authorised.toml"  # public keys of users and nodes, with their roles


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduling policy and its options."""

    name: str = "ones"  # name of a policy, or module:Class
    options: dict[str, Any] = {}  # see the policy's page
    outside: bool = False  # True: `ones policy set` may name module:Class


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of silence after which a node is suspect, and after which it is lost."""

    suspect_s: Interval = 6.0  # suspect: no new job starts there
    lost_s: Interval = 30.0  # lost: its jobs go on elsewhere
    missed_s: Interval = 5.0  # lost this early if workers on other nodes wait only for its workers
    forget_s: Interval = 30 * DAY_S  # a node that was lost for so long is removed


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on stored files."""

    log_bytes_per_job: Bytes = 1 << 30  # output of one job
    log_bytes_per_s: Annotated[int, msgspec.Meta(ge=1)] = 4 << 20  # per job; excess output waits
    snapshot_bytes: Bytes = 512 << 20  # one packed working directory
    workdir: ArchiveBounds = ArchiveBounds()  # limits of an unpacked working directory
    upload_bytes: Bytes = 2 << 30  # for one user's unfinished uploads
    keep_uploads_s: NotNegative = 3600.0  # since the last piece of an unfinished upload
    keep_logs_s: NotNegative = 30 * DAY_S  # after the end of the job
    keep_logs_bytes: Annotated[int, msgspec.Meta(ge=0)] = 50 << 30  # for all ended jobs together
    keep_archives_s: NotNegative = 30 * DAY_S  # for working directories that no job needs
    keep_archives_bytes: Annotated[int, msgspec.Meta(ge=0)] = 20 << 30  # for all of them together


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds for each user."""

    requests_per_s: Annotated[float, msgspec.Meta(ge=1)] = 2000.0  # further requests wait
    live_bytes: Annotated[int, msgspec.Meta(ge=1)] = 32 << 20  # job files of all live jobs
    ordered_slots: Annotated[int, msgspec.Meta(ge=1)] = 1024  # of all resize orders together
    archive_bytes: Bytes = 8 << 30  # for working directories; unneeded ones are deleted first


class JournalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Retention of the journal. docs/operations/storage.md lists all retention settings."""

    snapshot_inputs: Annotated[int, msgspec.Meta(ge=1)] = 20_000  # between snapshots
    keep_inputs_s: NotNegative = 7 * DAY_S  # for inputs of the core, which a replay needs
    keep_events_s: NotNegative = 30 * DAY_S  # for events
    keep_jobs_s: NotNegative = 365 * DAY_S  # for ended jobs and their records
    keep_records: Annotated[int, msgspec.Meta(ge=1000)] = 100_000  # for each record list of a job
    keep_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = 4 << 30  # size of the journal file


Notified = Literal[
    "job.succeeded", "job.failed", "job.cancelled", "job.rejected", "node.lost", "node.unhealthy",
    "controller.stalled",
]  # fmt: skip


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """Receiver of events by HTTP."""

    EXAMPLES: ClassVar = {"name": '"chat"', "url": '"https://chat.example.org/hooks/ones"'}

    name: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,100}$")]  # name in logs
    url: Annotated[str, msgspec.Meta(pattern="^https?://[^ ]+$")]  # where events are posted
    # events that are sent
    events: tuple[Notified, ...] = ("job.succeeded", "job.failed", "job.cancelled", "job.rejected")
    key: str = ""  # file with the secret that signs requests, relative to the settings file


class StandbySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Several controllers, of which one is active. They share the server's key and this section."""

    EXAMPLES: ClassVar = {
        "lease": '"postgresql://ones@db.example.org/ones"', "hosts": '["10.0.0.1", "10.0.0.2"]',
    }  # fmt: skip

    lease: str = ""  # postgresql://..., etcd(s)://HOST:PORT, or a file; "": there is no standby
    cluster: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,100}$")] = "ones"  # its name
    hosts: tuple[str, ...] = ()  # `listen.host` of each; the first one begins a new cluster
    port: Port = 7706  # of the active controller, for its standbys
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=600)] = 3.0  # until a lease can be claimed
    silence_s: Annotated[float, msgspec.Meta(ge=0.5, le=600)] = 2.0  # commits wait for a standby


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the controller's TOML file."""

    state: str = "state"  # journal, logs and snapshots, relative to the settings file
    pid_file: str = ""  # file for the number of the process; "": none
    listen: Listen = Listen()
    keys: Keys = Keys()
    policy: PolicyChoice = PolicyChoice()
    silence: Silence = Silence()
    store: Store = Store()
    limits: Limits = Limits()
    sharing: Sharing = Sharing()
    journal: JournalSettings = JournalSettings()
    standby: StandbySettings = StandbySettings()
    webhooks: tuple[Webhook, ...] = ()


def load(path: Path) -> ControllerSettings:
    """Read the settings in `path`. `ONES__SECTION__KEY` variables override them.

    Raises:
        SettingsError: if the file cannot be read, or a key is unknown or has an invalid value.
    """
    found = settings.load(ControllerSettings, path, os.environ)
    for problem in problems(found.sharing):
        field = f"sharing.{problem.field}"
        raise SettingsError(f"{path}: {field}: {problem.what}", problem.remedy, field)
    if found.standby.lease and found.listen.host not in found.standby.hosts:
        what = f"{path}: standby.hosts: listen.host, {found.listen.host}, is missing"
        raise SettingsError(what, "list the hosts of all controllers", "standby.hosts")
    return found
