"""CURVE keys with their files and owners, and the ZAP handler that admits keys.

Key files have pyzmq's certificate format, so that plain clients can read them. Expired keys become
invalid without any action.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import stat
import struct
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
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
from schemas.transport.connection_limits import MAX_CONNECTIONS_PER_KEY
from schemas.transport.flood_guard import FloodGuard
from schemas.wire.client import Role

ENDPOINT = "inproc://zeromq.zap.01"
DRAIN: Final = 256  # handshakes answered without returning to the loop
EAST_ASIAN: Final = frozenset({"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"})
MAX_NAME: Final = 64  # characters; for users, nodes and projects
KEY_BYTES: Final = 32
MAX_PROJECTS: Final = 100  # maximum number for one key


@dataclass(frozen=True, slots=True)
class Identity:
    """Owner of an authorised key. `role` is admin, operator, user, viewer, node or join."""

    role: str
    name: str
    projects: tuple[str, ...] = ()  # empty: own project of a user, or all projects for other roles
    expires: float | None = None  # seconds since the epoch; None: never

    def __str__(self) -> str:
        """Role and name, for people."""
        return f"{self.role}:{self.name}"


class _NotNowError(Exception):
    """The key may connect later, when some of its connections are closed or a delay is over."""


class Authority:
    """ZAP handler that tells libzmq whether a key may connect, for one context.

    If the handler stopped after an exception, every later handshake would wait. Therefore `run`
    refuses only the failed request and continues. The application's task group owns `run`. `denied`
    is called with the reason of a refusal and the address of the peer.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        known: Mapping[bytes, Identity],
        denied: Callable[[str, str], None],
        flood_guard: FloodGuard,
    ) -> None:
        self._known = known
        self._denied = denied
        self._flood_guard = flood_guard
        self._address = ""  # address of the peer in the current request
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ENDPOINT)
        self._zap = Authenticator(context)  # sets the User-Id of frames to the peer's key, Z85
        self._now: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)  # without futures
        self._zap.zap_socket = self._now
        self.admits_to("ones")

    def admits_to(self, port: str) -> None:
        """Also decide on connections to `port`. The name of a port is its ZAP domain."""
        self._zap.configure_curve_callback(port, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a Z85 key may connect to the port `domain` (called by pyzmq)."""
        owner = self._known.get(key)
        if owner is None:
            self._denied(f"{key.decode('ascii', 'replace')} is not authorised", self._address)
            return False
        self._flood_guard.process_port_events(domain)
        left_s = self._flood_guard.backoff.left_s(domain, key)
        if left_s and owner.role != "node":  # losing a node would also stop jobs of other users
            if self._flood_guard.backoff.first_refusal(domain, key):
                why = f"{owner} cannot connect for {left_s:.0f} s: its connections were cut off"
                self._denied(why, self._address)
            raise _NotNowError
        if self._flood_guard.keys.admit(domain, self._address, key):
            return True
        if self._flood_guard.keys.first_refusal(domain, key):
            why = f"{owner} has {MAX_CONNECTIONS_PER_KEY} connections to one port, the maximum"
            self._denied(why, self._address)
        raise _NotNowError

    async def run(self) -> None:
        """Wait for a request, then answer all waiting requests. Repeat this until cancelled.

        A thousand returning nodes connect at once. With one answer per turn of a busy event loop,
        the answers would arrive after the handshake timeouts, and the nodes would ask again.
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
        except _NotNowError:  # a temporary failure: peers retry after their handshake timeout
            self._now.send_multipart([b"1.0", request[1], b"300", b"not now", b"", b""])
        except Exception as error:  # noqa: BLE001 - a REP socket must reply before it can receive
            self._denied(f"unusable request: {error!r}", self._address)
            request_id = request[1] if len(request) > 1 else b""
            self._now.send_multipart([b"1.0", request_id, b"500", b"no answer", b"", b""])

    def close(self) -> None:
        """Release the inproc address."""
        self._socket.close()


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85."""

    public: bytes
    secret: bytes


class _AuthorisedKey(msgspec.Struct, frozen=True, kw_only=True):
    EXAMPLES: ClassVar = {"public": '"40 characters"', "name": '"ann"'}

    public: Annotated[str, msgspec.Meta(min_length=40, max_length=40)]  # Z85
    name: str
    role: Role
    project: str = ""  # a single project, or
    projects: tuple[str, ...] = ()  # several projects
    expires: dt.datetime | float | None = None  # RFC 3339, or seconds since the epoch


class _Authorised(msgspec.Struct, frozen=True, kw_only=True):
    key: list[_AuthorisedKey] = []


def write_keys(folder: Path, name: str) -> KeyPair:
    """Create `name.key_secret` (0600, both keys) and `name.key` (public key) in `folder`.

    The folder is created (0700) if it is missing.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as private:  # only this user can read it
        for made in map(Path, zmq.auth.create_certificates(private, name)):
            made.chmod(0o600)
            made.replace(folder / made.name)  # does not follow an existing link
    return load_keys(folder / f"{name}.key_secret")


def load_keys(path: Path) -> KeyPair:
    """Return the key pair in a `.key_secret` file of mode 0600.

    Raises:
        SettingsError: if the file cannot be read, or other users can read it.
    """
    require_private(path)
    public, secret = _load(path)
    if secret is None:
        raise SettingsError(f"{path}: no secret key in it", "give the .key_secret file")
    return KeyPair(public, secret)


def check_pair(path: Path) -> KeyPair:
    """Return the pair in a `.key_secret` file whose halves, and whose `.key` file, fit together.

    Raises:
        SettingsError: if they do not, or `load_keys` refuses the file.
    """
    pair = load_keys(path)
    if zmq.curve_public(pair.secret) != pair.public:
        raise SettingsError(f"{path}: its halves are not a pair", "copy the file again")
    public = path.with_suffix(".key")
    if public != path and public.exists() and load_public(public) != pair.public:
        what = f"{public} is not the public half of {path}"
        raise SettingsError(what, "copy both files again")
    return pair


def load_public(path: Path) -> bytes:
    """Return the public key (40 bytes, Z85) in a `.key` or `.key_secret` file.

    Raises:
        SettingsError: if the file cannot be read or contains no key.
    """
    public = _load(path)[0]
    check_public(public.decode("ascii", "replace"))
    return public


def next_key_path(path: Path) -> Path:
    """Return the path of the key that will replace the key at `path` in a rotation."""
    return path.with_name(f"{path.stem}-next{path.suffix}")


class ServerKeys:
    """Public keys by which a peer knows the controller: the current and, in a rotation, the next.

    Args:
        path: file of the current key. The next key is in the file of `next_key_path`, if it exists.

    Raises:
        SettingsError: if the file of the current key cannot be read or contains no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.current = load_public(path)

    def other(self) -> bytes | None:
        """Use the other key from now on and return it, or return None if there is only one."""
        for path in (next_key_path(self._path), self._path):
            with contextlib.suppress(SettingsError):
                if (found := load_public(path)) != self.current:
                    self.current = found
                    return found
        return None

    def learn(self, public: str) -> None:
        """Store the next key, if the folder of the current key may be written."""
        check_public(public)
        path = next_key_path(self._path)
        with contextlib.suppress(SettingsError):
            if public.encode() == load_public(path):
                return
        if public.encode() != self.current:
            fresh = path.with_suffix(".new")
            with contextlib.suppress(OSError):
                fresh.write_text(f'curve\n    public-key = "{public}"\n', encoding="ascii")
                fresh.replace(path)

    def confirm(self) -> None:
        """Replace the stored key by the next one if the controller has replied to the next one.

        If the folder cannot be written, the next key stays the second one.
        """
        with contextlib.suppress(OSError, SettingsError):
            following = next_key_path(self._path)
            if following.exists() and load_public(following) == self.current:
                following.replace(self._path)


def load_authorised(path: Path) -> dict[bytes, Identity]:
    """Return the identity of each public key (Z85) that may connect.

    The file (mode 0600) is TOML with a `[[key]]` table for each key. The table has `public`,
    `name`, `role` (admin, operator, user, viewer, node or join), and may have `project` or
    `projects`, which restrict the key.

    Raises:
        SettingsError: if the file cannot be read, other users can read it, or an entry is invalid.
    """
    require_private(path)
    table = convert(_Authorised, read_toml(path), path)
    return {entry.public.encode(): _identity(entry, path) for entry in table.key}


def check_name(name: str, field: str) -> None:
    """Check the name of a user, node or project, as used in topics, request keys and terminals.

    Raises:
        SettingsError: if the name is empty, too long, `.` or `..`, contains spaces, slashes or
            unprintable characters, or might look like another name.
    """
    steers = set(name) & {" ", "/"} or name in {".", ".."}
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or steers:
        what = f"{field}: {name[:MAX_NAME]!r} is not a name"
        hint = f"give 1 to {MAX_NAME} printable characters without spaces and slashes"
        raise SettingsError(what, hint, field)
    odd = any(not (letter.isascii() or letter.isalnum()) for letter in name)
    if odd or unicodedata.normalize("NFKC", name) != name or len(_scripts(name)) > 1:
        what = f"{field}: {name[:MAX_NAME]!a} may look like another name"
        hint = "give letters of one script in normal form (NFKC), digits and ASCII characters"
        raise SettingsError(what, hint, field)


def _scripts(name: str) -> set[str]:
    """Return the scripts of the letters of a name, such as LATIN.

    Names mix the scripts of Chinese, Japanese and Korean, so these count as one.
    """
    letters = (unicodedata.name(letter, "?") for letter in name if letter.isalpha())
    found = {words.partition(" ")[0] for words in letters}
    return {"CJK" if script in EAST_ASIAN else script for script in found}


def check_public(public: str) -> None:
    """Check that a public key has 40 characters of Z85."""
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
    """Return the identity of a key's owner. The arguments are the fields of `Identity`.

    Raises:
        SettingsError: if a name or a time is invalid, or there are too many projects.
    """
    check_name(name, "name")
    if len(projects) > MAX_PROJECTS:
        what = f"projects: {len(projects)} projects, at most {MAX_PROJECTS}"
        raise SettingsError(what, "give the key of an operator or an admin instead", "projects")
    for project in projects:
        check_name(project, "project")
    if expires is not None and not 0.0 <= expires <= LAST:
        raise SettingsError("expires: not a valid time", "leave it out for never", "expires")
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
        what = f"expires: {expires.isoformat()} has no time zone"
        raise SettingsError(what, "append Z for UTC", "expires")
    return expires.timestamp()


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}", "point at a CURVE certificate") from None
    return public, secret


def require_private(path: Path) -> None:
    """Check that only the owner can access a file.

    Raises:
        SettingsError: if other users can access it, or the file does not exist.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "check the path") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and os.name == "posix":
        what = f"{path} is accessible to other users (mode {stat.S_IMODE(mode):o})"
        raise SettingsError(what, f"chmod 600 {path}")


class KnownKeys(Mapping[bytes, Identity]):
    """Mapping from the valid keys (Z85) among the `listed` keys to their owners."""

    def __init__(
        self, listed: Mapping[bytes, Identity], clock: Callable[[], float] = time.time
    ) -> None:
        self.listed = dict(listed)
        self._clock = clock

    def __getitem__(self, key: bytes) -> Identity:
        """Return the owner of a valid key."""
        owner: Identity | None = self.get(key)
        if owner is None:
            raise KeyError(key)
        return owner

    def get(self, key: bytes, default: Any = None) -> Any:
        """Return the owner of a valid key, or `default`. This is called for every message."""
        owner = self.listed.get(key)
        if owner is None or (owner.expires is not None and self._clock() >= owner.expires):
            return default
        return owner

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over the valid keys."""
        return (key for key in self.listed if self.get(key) is not None)

    def __len__(self) -> int:
        """Return the number of valid keys."""
        return sum(1 for _ in self)

    def next_expiry(self) -> float:
        """Return the time at which the next valid key expires, in seconds since the epoch."""
        return min((who.expires for who in self.values() if who.expires is not None), default=inf)
