"""CURVE keys as files, in pyzmq's own certificate format so that plain clients can read them.

Who is behind a socket: the ZAP handler that maps a CURVE key to an identity.

Who may connect at this moment: keys end by themselves when their time is over.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.base import Authenticator
from zmq.utils import z85

from schemas.errors import SettingsError
from schemas.host.settings import convert, read_toml
from schemas.ids import LAST
from schemas.transport.connection_limits import MAX_OF_KEY
from schemas.transport.flood_guard import ConnectionWatch
from schemas.wire.client import Role

ENDPOINT = "inproc://zeromq.zap.01"
DRAIN: Final = 256  # handshakes answered without returning to the loop


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of an authorised key; `role` is admin, operator, user, viewer or node."""

    role: str
    name: str
    projects: tuple[str, ...] = ()  # none: a user's own; all of them for other people's keys
    expires: float | None = None  # seconds since the epoch; None: never

    def __str__(self) -> str:
        """For people."""
        return f"{self.role}:{self.name}"


class _NotNowError(Exception):
    """This key may connect, when others of its connections are closed or some time has passed."""


class Authority:
    """Answers libzmq's question whether a key may connect, for one context.

    An exception while answering would leave every later handshake hanging, so `run` refuses that
    one request and goes on; it is to be owned by the application's task group.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        known: Mapping[bytes, Identity],
        denied: Callable[[str, str], None],
        watch: ConnectionWatch,
    ) -> None:
        """Bind the context's ZAP address.

        Args:
            known: public key (Z85) to its owner; may change while this runs.
            denied: called with why somebody was refused, and the address that it came from.
            watch: knows how many connections each key has.
        """
        self._known = known
        self._denied = denied
        self._watch = watch
        self._address = ""  # of who is asked about
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._zap = Authenticator(context)  # its User-Id of a frame is the peer's key, Z85
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)  # the same, without futures
        self._zap.zap_socket = self._now
        self.admits_to("ones")

    def admits_to(self, port: str) -> None:
        """Answer for one more port.

        Args:
            port: its name, which is its ZAP domain.
        """
        self._zap.configure_curve_callback(port, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this Z85 key is authorised (called by pyzmq).

        Args:
            domain: of the socket that asks: the name of its port.
            key: public, Z85.
        """
        owner = self._known.get(key)
        if owner is None:
            self._denied(f"{key.decode('ascii', 'replace')} is not authorised", self._address)
            return False
        self._watch.notice_at(domain)
        left_s = self._watch.backoff.left_s(domain, key)
        if left_s and owner.role != "node":  # jobs of others run on a node that would be lost
            if self._watch.backoff.first_refusal(domain, key):
                why = f"{owner} gets no connection for {left_s:.0f} s: others of its were cut off"
                self._denied(why, self._address)
            raise _NotNowError
        if self._watch.keys.admits(domain, self._address, key):
            return True
        if self._watch.keys.first_refusal(domain, key):
            why = f"{owner} has {MAX_OF_KEY} connections to one port, as many as may be"
            self._denied(why, self._address)
        raise _NotNowError

    async def run(self) -> None:
        """Answer for ever: waits once, then answers whoever else asks by then.

        A thousand nodes that come back ask at once. One answer in each turn of a busy loop would
        come after their handshakes' time, and they would ask again.
        """
        while True:
            await self._answer(await self._socket.recv_multipart())
            for _ in range(DRAIN):
                try:
                    more = self._now.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                await self._answer(more)
            else:
                await asyncio.sleep(0)

    async def _answer(self, request: list[bytes]) -> None:
        self._address = request[3].decode("ascii", "replace") if len(request) > 3 else ""  # noqa: PLR2004
        try:
            await self._zap.handle_zap_message(request)
        except (
            _NotNowError
        ):  # as a temporary failure: peers try again when their handshake's time is over
            self._now.send_multipart([b"1.0", request[1], b"300", b"not now", b"", b""])
        except Exception as error:  # noqa: BLE001 - a REP socket must answer before it hears more
            self._denied(f"unusable request: {error!r}", self._address)
            request_id = request[1] if len(request) > 1 else b""
            self._now.send_multipart([b"1.0", request_id, b"500", b"no answer", b"", b""])

    def close(self) -> None:
        """Give up the inproc address."""
        self._socket.close()


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, Z85."""

    public: bytes
    secret: bytes


MAX_NAME: Final = 64  # characters of a user's, a node's, a project's name
KEY_BYTES: Final = 32
MAX_PROJECTS: Final = 100  # of one key


class _AuthorisedKey(msgspec.Struct, frozen=True, kw_only=True):
    EXAMPLES: ClassVar = {"public": '"40 characters"', "name": '"ann"'}

    public: Annotated[str, msgspec.Meta(min_length=40, max_length=40)]  # Z85
    name: str
    role: Role
    project: str = ""  # one, or
    projects: tuple[str, ...] = ()  # several
    expires: dt.datetime | float | None = None  # RFC 3339, or seconds since the epoch


class _Authorised(msgspec.Struct, frozen=True, kw_only=True):
    key: list[_AuthorisedKey] = []


def write_keys(folder: Path, name: str) -> KeyPair:
    """Make `name.key_secret` (0600, both halves) and `name.key` (public half) in `folder`.

    Args:
        folder: made (0700) if it is not there.
        name: of both files, without ending.

    Raises:
        SettingsError: if what was written cannot be read again.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as private:  # nobody else reads what is in it
        for made in map(Path, zmq.auth.create_certificates(private, name)):
            made.chmod(0o600)
            made.replace(folder / made.name)  # a link that is there is not followed
    return load_keys(folder / f"{name}.key_secret")


def load_keys(path: Path) -> KeyPair:
    """The pair in a `.key_secret` file.

    Args:
        path: a `.key_secret` file, mode 0600.

    Raises:
        SettingsError: if it cannot be read, or others than its owner can.
    """
    refuse_wide(path)
    public, secret = _load(path)
    if secret is None:
        raise SettingsError(f"{path}: no secret key in it", "give the .key_secret file")
    return KeyPair(public, secret)


def load_public(path: Path) -> bytes:
    """The public key in a `.key` or `.key_secret` file.

    Args:
        path: a certificate in pyzmq's format.

    Returns:
        40 bytes, Z85.

    Raises:
        SettingsError: if it cannot be read or holds no key.
    """
    return _load(path)[0]


def load_authorised(path: Path) -> dict[bytes, Identity]:
    """Who may connect: public key (Z85) to identity.

    The file is TOML, a `[[key]]` table each with `public`, `name` and `role` (admin, operator,
    user, viewer or node), and `project` or `projects` where it is for some alone.

    Args:
        path: mode 0600.

    Raises:
        SettingsError: if it cannot be read, others than its owner can, or an entry is wrong.
    """
    refuse_wide(path)
    table = convert(_Authorised, read_toml(path), path)
    return {entry.public.encode(): _identity(entry, path) for entry in table.key}


def check_name(name: str, field: str) -> None:
    """Refuse a name that would be none: it stands in topics, in keys of requests and on terminals.

    Args:
        name: of a user, a node or a project.

    Raises:
        SettingsError: if it is empty, long, `.` or `..`, or has spaces, slashes or what cannot be
            printed.
    """
    steers = set(name) & {" ", "/"} or name in {".", ".."}
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or steers:
        what = f"{field}: {name[:MAX_NAME]!r} is no name"
        hint = f"give 1 to {MAX_NAME} printable characters without spaces and slashes"
        raise SettingsError(what, hint, field)


def check_public(public: str) -> None:
    """Refuse what is no public key.

    Args:
        public: 40 characters of Z85.

    Raises:
        SettingsError: if it is none.
    """
    try:
        usable = len(z85.decode(public)) == KEY_BYTES
    except (ValueError, KeyError, TypeError, struct.error):
        usable = False
    if not usable:
        what = "public: these are not 40 characters of Z85"
        raise SettingsError(what, "give the `public-key` of the .key file", "public")


def identity_of(
    name: str, role: str, projects: tuple[str, ...], expires: float | None = None
) -> Identity:
    """The owner of a key.

    Args:
        projects: whose jobs it is for; none: see `Identity`.
        expires: when it ends, seconds since the epoch; None: never.

    Raises:
        SettingsError: if a name is none, or there are too many of them.
    """
    check_name(name, "name")
    if len(projects) > MAX_PROJECTS:
        what = f"projects: {len(projects)} of them, at most {MAX_PROJECTS}"
        raise SettingsError(what, "give the key of an operator or an admin instead", "projects")
    for project in projects:
        check_name(project, "project")
    if expires is not None and not 0.0 <= expires <= LAST:
        raise SettingsError("expires: that is no time", "leave it out for never", "expires")
    return Identity(role, name, tuple(dict.fromkeys(projects)), expires)


def _identity(entry: _AuthorisedKey, path: Path) -> Identity:
    projects = (*((entry.project,) if entry.project else ()), *entry.projects)
    try:
        return identity_of(entry.name, entry.role, projects, _seconds(entry.expires))
    except SettingsError as error:
        raise SettingsError(f"{path}: {error.message}", error.hint, f"key.{error.field}") from None


def _seconds(expires: dt.datetime | float | None) -> float | None:
    if not isinstance(expires, dt.datetime):
        return expires
    if expires.tzinfo is None:
        what = f"expires: {expires.isoformat()} says no zone"
        raise SettingsError(what, "append Z for UTC", "expires")
    return expires.timestamp()


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}", "point at a CURVE certificate") from None
    return public, secret


def refuse_wide(path: Path) -> None:
    """Refuse a file that others than its owner can read.

    Raises:
        SettingsError: if they can, or it is not there.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "check the path") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and os.name == "posix":
        what = f"{path} can be used by others than its owner (mode {stat.S_IMODE(mode):o})"
        raise SettingsError(what, f"chmod 600 {path}")


class KnownKeys(Mapping[bytes, Identity]):
    """Public key (Z85) to its owner; a key beyond its time is not in it.

    Args:
        listed: all keys, those beyond their time, too.
        clock: seconds since the epoch.
    """

    def __init__(
        self, listed: Mapping[bytes, Identity], clock: Callable[[], float] = time.time
    ) -> None:
        self.listed = dict(listed)
        self._clock = clock

    def __getitem__(self, key: bytes) -> Identity:
        """The owner of a key that is valid now."""
        who = self.listed[key]
        if who.expires is not None and self._clock() >= who.expires:
            raise KeyError(key)
        return who

    def get(self, key: bytes, default: Any = None) -> Any:
        """The same; asked for with every message.

        Args:
            key: public, Z85.
            default: in its place if there is none.
        """
        who = self.listed.get(key)
        if who is None or (who.expires is not None and self._clock() >= who.expires):
            return default
        return who

    def __iter__(self) -> Iterator[bytes]:
        """Keys that are valid now."""
        return (key for key in self.listed if self.get(key) is not None)

    def __len__(self) -> int:
        """How many are valid now."""
        return sum(1 for _ in self)
