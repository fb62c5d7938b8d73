"""`bin/release`: what it builds and signs from a commit, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from schemas import __version__
from tests.system.box import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not all(map(shutil.which, ("git", "ssh-keygen"))) or not (ROOT / ".git").exists(),
        reason="needs git, ssh-keygen, and a checkout",
    ),
]


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def commit(folder: Path) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    done = run(folder, "git", *author, "commit", "-qam", "Release")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A clone with a released version, and a key beside it."""
    made = tmp_path / "ones"
    assert run(tmp_path, "git", "clone", "-q", ROOT, made).returncode == 0
    changes = made / "CHANGELOG.md"
    changes.write_text(
        f"# Changelog\n\n## {__version__}\n\n- **Packages**: new.\n\n## 0.0.1\n\nOld.\n"
    )
    commit(made)
    run(tmp_path, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key")
    public = (tmp_path / "key.pub").read_text()
    (tmp_path / "allowed_signers").write_text(f"ones {public}")
    return made


def test_two_releases_of_a_commit_are_equal_and_signed(checkout: Path, tmp_path: Path) -> None:
    out = [tmp_path / name for name in ("first", "second")]
    for folder in out:
        done = run(checkout, "bin/release", __version__, tmp_path / "key", folder, "--no-deb")
        assert done.returncode == 0, done.stderr

    sums, again = ((folder / "SHA256SUMS").read_text() for folder in out)
    assert sums == again
    names = {line.split()[1] for line in sums.splitlines()}
    assert names == {
        "NOTES.md", f"ones_scheduler-{__version__}-py3-none-any.whl", f"ones_scheduler-{__version__}.tar.gz",
    }  # fmt: skip
    notes = (out[0] / "NOTES.md").read_text()
    assert "- **Packages**: new." in notes
    assert "Old." not in notes
    verify = next(line.strip() for line in notes.splitlines() if "-Y verify" in line)
    shutil.copy(tmp_path / "allowed_signers", out[0])
    assert run(out[0], "bash", "-c", f"{verify} && sha256sum --check SHA256SUMS").returncode == 0
    (out[0] / "SHA256SUMS").write_text(sums.replace("a", "b"))
    assert run(out[0], "bash", "-c", verify).returncode != 0


def test_what_cannot_be_released_is_refused(checkout: Path, tmp_path: Path) -> None:
    def refusal(version: str) -> str:
        done = run(checkout, "bin/release", version, tmp_path / "key", tmp_path / "out")
        assert (done.returncode, (tmp_path / "out").exists()) == (2, False)
        return done.stderr

    assert "has another version" in refusal("9.9.9")
    (checkout / "LICENSE").write_text("changed")
    assert "the working tree has changes" in refusal(__version__)
    (checkout / "CHANGELOG.md").write_text(f"## {__version__} (unreleased)\n\n- new\n")
    assert f"no section '## {__version__}'" in refusal(__version__)
