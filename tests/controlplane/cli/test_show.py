"""What `ones show` prints of a job."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.cli.show_and_explain import print_job
from schemas.messages.client import JobDetail
from tests.support.schemas_examples import EXAMPLES


def test_an_epoch_whose_loop_the_script_left_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    detail = msgspec.convert(EXAMPLES["client.job_detail.3"], JobDetail)
    first = msgspec.structs.replace(
        detail.epochs[0], epoch=3, trained_samples=1000, epoch_samples=1000, left_early=False
    )
    second = msgspec.structs.replace(first, epoch=4, trained_samples=512, left_early=True)

    print_job(msgspec.structs.replace(detail, epochs=(first, second)))

    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert said[1:] == ["epoch 4: 512 of 1000 samples (the script left its loop)"]
