"""Private files with the values of secret variables: one NAME=VALUE on each line."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from schemas.errors import BadFieldError
from schemas.host.files import open_regular
from schemas.jobs import ENV_NAME, MAX_SECRET_BYTES, JobSpec, SecretEnv, are_secrets

FIELD: Final = "secret_env"
PRIVATE: Final = 0o600
FORM: Final = "write NAME=VALUE on each line, without quotes; # begins a comment"


class Separated(NamedTuple):
    """A job file with the names of its secret variables, and their values."""

    spec: JobSpec
    secrets: dict[str, str]


def separated(spec: JobSpec) -> Separated:
    """Replace the file of secret variables by their names. Return the values apart.

    Raises:
        BadFieldError: if the file cannot be used. No error shows a value.
    """
    if not isinstance(spec.secret_env, str):
        return Separated(spec, {})
    values = read_secrets(Path(spec.secret_env))
    named = SecretEnv(names=tuple(sorted(values)))
    return Separated(msgspec.structs.replace(spec, secret_env=named), values)


def secret_file(spec: JobSpec) -> Path | None:
    """Return the file of a job's secret variables, which stays on this host."""
    return Path(spec.secret_env) if isinstance(spec.secret_env, str) else None


def read_secrets(path: Path) -> dict[str, str]:
    """Return the variables in a private file.

    Raises:
        BadFieldError: if it cannot be read, others can read it, or a line is no variable.
    """
    try:
        descriptor = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            data = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        what = f"{FIELD}: {path} cannot be read: {error.strerror}"
        raise BadFieldError(what, "correct the path", FIELD) from None
    if status.st_uid != os.geteuid():
        what = f"{FIELD}: {path} belongs to another user"
        raise BadFieldError(what, "give a file of your own", FIELD)
    if (mode := stat.S_IMODE(status.st_mode)) & ~PRIVATE:
        what = f"{FIELD}: {path} has mode {mode:03o}, and may be for its owner only"
        raise BadFieldError(what, f"chmod 600 {path}", FIELD)
    if len(data) > MAX_SECRET_BYTES:
        what = f"{FIELD}: {path} has more than {MAX_SECRET_BYTES} bytes"
        raise BadFieldError(what, "put large secrets into a file on the nodes", FIELD)
    return _parsed(path, data)


def _parsed(path: Path, data: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(data.decode("utf-8-sig", "surrogateescape").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, sign, value = line.partition("=")
        name = name.strip()
        if not sign or not ENV_NAME.fullmatch(name) or name in found:
            what = "repeats a name" if name in found else "is no variable"
            raise BadFieldError(f"{FIELD}: line {number} of {path} {what}", FORM, FIELD)
        found[name] = value
    if not found or not are_secrets(found):
        what = "has no variable" if not found else "is not text in UTF-8"
        raise BadFieldError(f"{FIELD}: {path} {what}", FORM, FIELD)
    return found
