"""Keys that detach, ports of a command line, and jobs on a terminal."""

from __future__ import annotations

import pytest

from controlplane.cli.attach import Escapes, _ports
from controlplane.client.command_line import job_on_terminal
from schemas.errors import BadFieldError
from schemas.jobs import JobSpec, problems


@pytest.mark.parametrize(
    ("typed", "sent", "left"),
    [
        (b"~.", b"", True),
        (b"ls\r~.", b"ls\r", True),
        (b"ls ~.\r", b"ls ~.\r", False),  # not at the start of a line
        (b"~~.\r", b"~.\r", False),
        (b"~/bin\r", b"~/bin\r", False),
        (b"a\r~", b"a\r", False),
        (b"\x03\r", b"\x03\r", False),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_tilde_and_a_dot_at_the_start_of_a_line_detach(
    *, typed: bytes, sent: bytes, left: bool, at_once: bool
) -> None:
    escapes = Escapes()
    pieces = [typed] if at_once else [bytes([byte]) for byte in typed]

    taken = [escapes.take(piece) for piece in pieces]

    assert b"".join(data for data, _ in taken) == sent
    assert taken[-1][1] == left


def test_a_forwarded_port_has_the_same_number_here_or_another() -> None:
    assert (_ports("6006"), _ports("6006:8080")) == ((6006, 6006), (6006, 8080))


@pytest.mark.parametrize("text", ["", "0", "65536", "x", "1:2:3", "6006:", ":80", "-1"])
def test_other_words_are_no_ports(text: str) -> None:
    if text == "6006:":
        assert _ports(text) == (6006, 6006)
        return
    with pytest.raises(BadFieldError, match="is not PORT or PORT:LOCAL"):
        _ports(text)


def test_a_job_on_a_terminal_is_a_shell_unless_told_otherwise() -> None:
    environ = {"TERM": "xterm-256color", "LANG": "", "HOME": "/home/ann"}

    plain, python = job_on_terminal((), environ), job_on_terminal(("python", "-q"), environ)

    assert (plain["name"], plain["env"]) == ("shell", {"TERM": "xterm-256color"})
    assert python["command"] == ["python", "-q"]
    for fields in (plain, python):
        spec = JobSpec(**{**fields, "command": tuple(fields["command"])})
        assert problems(spec) == ()
        assert (spec.rigid, spec.single, spec.fails_on_loss) == (True, True, True)
        assert spec.run_limit_s == 4 * 3600
