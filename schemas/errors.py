"""Errors that cross a wire, with stable codes, and the base class of all deliberate errors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar, Final

from schemas import __version__

TOO_MANY_FILES: Final = "Too many open files"  # message of the operating system and of ZeroMQ
MORE_FILES_HINT: Final = (
    "close unused files, or raise the limit (`ulimit -n`, LimitNOFILE of a service)"
)
MAX_COMPARED: Final = 1000  # names; comparing each takes 60 us
# Line in errors that torch raises for the process of a data loader.
WORKER_TRACEBACK: Final = "Original Traceback (most recent call last):"


class OnesError(Exception):
    """Base of every error that the project raises on purpose.

    Attributes:
        code: stable, machine-readable name, which is the same at both ends of a wire.
        message: one line that says what happened, without a full stop.
        hint: the remedy, or an empty string.
        field: path of the invalid field, or an empty string.
        needs_person: True if a new start of the daemon cannot succeed until a person acts.
    """

    code: ClassVar[str] = "internal"
    needs_person: ClassVar[bool] = False

    def __init__(self, message: str, hint: str = "", field: str = "") -> None:
        super().__init__(f"{message}; {hint}" if hint else message)
        self.message = message
        self.hint = hint
        self.field = field


class MissingExtraError(OnesError):
    """A package of an extra is not installed."""

    code = "missing_extra"
    needs_person = True

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}", install_hint(extra))


def install_hint(extra: str, python: str = "") -> str:
    """Return the command that installs an extra of this release, for an interpreter.

    A plain `ones-scheduler[EXTRA]` would ask a package index, where the project is not.
    """
    pip = f"{python} -m pip" if python else "pip"
    wheel = f"ones_scheduler-{__version__}-py3-none-any.whl"
    return f"{pip} install '{wheel}[{extra}]', or '.[{extra}]' in a checkout of ONES"


def root_cause(error: BaseException) -> BaseException:
    """Return the first exception of a (nested) exception group, or `error` if it is no group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def one_line_error(error: BaseException) -> str:
    """Return one line with the class, text and any remedy of the root cause of `error`."""
    error = root_cause(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = type(error).__name__
    if isinstance(error, SystemExit):
        line = lines[0] if lines else name
    elif isinstance(error, OnesError):
        line = f"{name}: {error.message}{f'; {error.hint}' if error.hint else ''}"
    elif WORKER_TRACEBACK in lines:
        line = f"{lines[-1]} ({lines[0].removesuffix('.')})"
    else:
        line = f"{name}: {lines[0]}" if lines else name
    if TOO_MANY_FILES in line and "ulimit" not in line:
        line = f"{line}; {MORE_FILES_HINT}"
    return "".join(c if c.isprintable() else " " for c in line)


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the hint `otherwise`, preceded by the most similar known name, if there is one.

    `known` lists existing names, oldest first. For `digits`, the last name of the form `digits-N`
    is proposed. If there is none, only the last 1000 names are compared, in less than 0.1 s.
    """
    names = list(known)
    numbered = [one for one in names if one.rpartition("-")[0] == name]
    near = numbered[-1:] or difflib.get_close_matches(name, names[-MAX_COMPARED:], n=1, cutoff=0.7)
    return f"did you mean {near[0]}? {otherwise}" if near else otherwise


class MalformedMessageError(OnesError):
    """Bytes that are not a message of this conversation."""

    code = "malformed"


class TooLargeError(OnesError):
    """A message or file exceeds a documented bound."""

    code = "too_large"


class BadFieldError(OnesError):
    """A value cannot be accepted. `field` is the path of the value."""

    code = "bad_field"


class UnknownJobError(OnesError):
    """The cluster has never accepted a job of this name. The hint may propose a `known` name."""

    code = "unknown_job"

    def __init__(self, job: str, known: Iterable[str] = ()) -> None:
        hint = suggestion(job, known, "`ones ps --all` lists every job")
        super().__init__(f"no job {job!r}", hint, "job")
        self.job = job


class UnknownNodeError(OnesError):
    """The cluster has never had a node of this name."""

    code = "unknown_node"


class DeniedError(OnesError):
    """The key is known, but has no right to make this request."""

    code = "denied"


class UnavailableError(OnesError):
    """The controller cannot make any change durable at the moment. Nothing was accepted."""

    code = "unavailable"


class UnreachableError(OnesError):
    """The controller does not reply."""

    code = "unreachable"


class TimedOutError(OnesError):
    """The wait ended before its condition was met."""

    code = "timeout"


class SettingsError(OnesError):
    """A settings file or job file cannot be used in its present form."""

    code = "settings"
    needs_person = True


class AddressInUseError(SettingsError):
    """Another socket is bound to the address; it may be closed soon."""

    needs_person = False


BY_CODE: dict[str, type[OnesError]] = {
    leaf.code: leaf
    for leaf in (
        MalformedMessageError,
        TooLargeError,
        BadFieldError,
        UnknownNodeError,
        DeniedError,
        UnavailableError,
        UnreachableError,
        TimedOutError,
        SettingsError,
    )
}


class RemoteError(OnesError):
    """An error from the other end, with a code that this release does not know."""

    def __init__(self, code: str, message: str, hint: str = "", field: str = "") -> None:
        super().__init__(message, hint, field)
        self.remote_code = code


def error_from_code(code: str, message: str, hint: str, field: str) -> OnesError:
    """Return the error that the other end raised. An unknown code becomes a `RemoteError`."""
    if code == UnknownJobError.code:
        return UnknownJobError(message.removeprefix("no job ").strip("'\""))
    leaf = BY_CODE.get(code)
    return leaf(message, hint, field) if leaf else RemoteError(code, message, hint, field)
