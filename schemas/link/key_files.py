"""CURVE keys as files, in pyzmq's own certificate format so that plain clients can read them."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import zmq
import zmq.auth

from schemas.errors import SettingsError
from schemas.link.key_owners import Identity
from schemas.toml_settings import convert, read_toml


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, Z85."""

    public: bytes
    secret: bytes


class _AuthorisedKey(msgspec.Struct, frozen=True, kw_only=True):
    public: Annotated[str, msgspec.Meta(min_length=40, max_length=40)]  # Z85
    name: str
    role: Literal["admin", "operator", "user", "viewer", "node"]


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
    public, secret = zmq.auth.create_certificates(folder, name)
    Path(public).chmod(0o600)
    Path(secret).chmod(0o600)
    return load_keys(Path(secret))


def load_keys(path: Path) -> KeyPair:
    """The pair in a `.key_secret` file.

    Args:
        path: a `.key_secret` file, mode 0600.

    Raises:
        SettingsError: if it cannot be read, or others than its owner can.
    """
    _refuse_wide(path)
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

    The file is TOML, a `[[key]]` table each with `public`, `name` and `role` (admin, user, viewer
    or node).

    Args:
        path: mode 0600.

    Raises:
        SettingsError: if it cannot be read, others than its owner can, or an entry is wrong.
    """
    _refuse_wide(path)
    table = convert(_Authorised, read_toml(path), path)
    return {
        entry.public.encode(): Identity(role=entry.role, name=entry.name) for entry in table.key
    }


def _load(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}", "point at a CURVE certificate") from None
    return public, secret


def _refuse_wide(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "check the path") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and os.name == "posix":
        what = f"{path} can be used by others than its owner (mode {stat.S_IMODE(mode):o})"
        raise SettingsError(what, f"chmod 600 {path}")
