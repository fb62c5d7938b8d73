"""CURVE keys as files, in pyzmq's own certificate format so that plain clients can read them."""

from __future__ import annotations

import datetime as dt
import os
import stat
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final

import msgspec
import zmq
import zmq.auth
from zmq.utils import z85

from schemas.errors import SettingsError
from schemas.ids import LAST
from schemas.link.key_owners import Identity
from schemas.messages.keys import Role
from schemas.toml_settings import convert, read_toml


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
