"""Files of secret variables: what they may contain, and that they stay on the submitting host."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.client.archive import survey
from controlplane.client.job_file import load_job
from controlplane.client.secret_env import read_secrets, secret_file, separated
from schemas.errors import BadFieldError
from schemas.jobs import SecretEnv

JOB = 'name = "a"\nkind = "command"\ncommand = ["true"]\nsecret_env = "my.env"\n'


def written(folder: Path, text: str = "A=1\n", mode: int = 0o600, more: str = "") -> Path:
    (folder / "my.env").write_text(text, encoding="utf-8")
    (folder / "my.env").chmod(mode)
    (folder / "job.toml").write_text(JOB + more, encoding="utf-8")
    return folder / "job.toml"


def test_values_are_the_text_after_the_first_sign(tmp_path: Path) -> None:
    written(tmp_path, '\n# of the registry\nTOKEN=a=b "c" \nEMPTY=\n  URL =https://x\n')

    assert read_secrets(tmp_path / "my.env") == {
        "TOKEN": 'a=b "c" ', "EMPTY": "", "URL": "https://x",
    }  # fmt: skip


def test_a_job_file_names_the_variables_and_its_values_travel_apart(tmp_path: Path) -> None:
    spec, secrets = separated(load_job(written(tmp_path, "B=2\nA=1\n")))

    assert spec.secret_env == SecretEnv(names=("A", "B"))
    assert secrets == {"A": "1", "B": "2"}


def test_the_file_is_not_uploaded_under_any_name(tmp_path: Path) -> None:
    file = written(tmp_path)
    (tmp_path / "link").symlink_to("my.env")
    (tmp_path / "hard").hardlink_to(tmp_path / "my.env")

    uploaded = survey(tmp_path, secret_file(load_job(file)))

    assert [one.path for one in uploaded] == ["job.toml"]


@pytest.mark.parametrize(
    ("text", "mode", "problem", "remedy"),
    [
        ("A=1\n", 0o640, "has mode 640, and may be for its owner only", "chmod 600 "),
        ("A=1\nB\n", 0o600, "line 2 of ", "write NAME=VALUE"),
        ("A=1\nc2VjcmV0 x=\n", 0o600, "line 2 of ", "write NAME=VALUE"),
        ("A=1\nA=2\n", 0o600, "line 2 of ", "write NAME=VALUE"),
        ("# none\n", 0o600, "has no variable", "write NAME=VALUE"),
        ("A=\0\n", 0o600, "is not text in UTF-8", "write NAME=VALUE"),
        (f"A={'x' * 40_000}\n", 0o600, "has more than 32768 bytes", "on the nodes"),
        ("ONES_A=1\n", 0o600, "secret_env.ONES_A: is reserved", "without the prefix"),
        ("CUDA_VISIBLE_DEVICES=1\n", 0o600, "is set by the cluster", "leave it out"),
        ("B=1\n", 0o600, "secret_env.B: is a variable of [env], too", "remove it"),
    ],
)
def test_a_bad_file_is_refused_without_its_content(
    tmp_path: Path, text: str, mode: int, problem: str, remedy: str
) -> None:
    file = written(tmp_path, text, mode, 'env = { B = "0" }\n')

    with pytest.raises(BadFieldError) as refused:
        load_job(file)

    assert problem in refused.value.message
    assert refused.value.hint.startswith(remedy) or remedy in refused.value.hint
    assert "c2VjcmV0" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    file = written(tmp_path)
    (tmp_path / "my.env").unlink()

    with pytest.raises(BadFieldError, match=r"my\.env cannot be read: No such file"):
        load_job(file)
