"""What a worker takes of its host."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from elastic.metrics import USAGE_WINDOW_S, Usage, UsageMeter, cpu_seconds


def test_usage_is_the_mean_of_the_last_whole_window() -> None:
    """Four workers: each sends 2 x 3/4 of what a ring sums."""
    meter = UsageMeter()
    meter.count_all_reduce(1000, members=4)  # before anybody asks

    assert meter.usage(cpu_s=7.0, now=100.0) is None
    meter.count_all_reduce(4000, members=4)
    assert meter.usage(cpu_s=9.0, now=100.0 + USAGE_WINDOW_S / 2) is None
    assert meter.usage(cpu_s=17.0, now=100.0 + USAGE_WINDOW_S) == Usage(2.0, 6000 / USAGE_WINDOW_S)
    assert meter.usage(cpu_s=90.0, now=101.0 + USAGE_WINDOW_S) == Usage(2.0, 6000 / USAGE_WINDOW_S)


def test_processor_time_that_goes_back_counts_as_none() -> None:
    """A child ended whose time nobody asked for."""
    meter = UsageMeter()
    meter.usage(cpu_s=7.0, now=0.0)

    assert meter.usage(cpu_s=5.0, now=USAGE_WINDOW_S) == Usage(0.0, 0.0)


@pytest.mark.slow
def test_children_that_run_count_and_those_that_ended_too() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        while cpu_seconds() - time.process_time() < 0.1:
            assert child.poll() is None
        child.kill()
        child.wait()

    assert cpu_seconds() - time.process_time() >= 0.1
