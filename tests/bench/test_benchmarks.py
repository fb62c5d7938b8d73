"""Command lines of all benchmarks, and that none leaves anything behind."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.bench import figures

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    path.stem for path in Path(__file__).parent.glob("*.py") if "\n    main()\n" in path.read_text()
)
NEEDED = {
    "hopper_figures": ("--into", "figures"),
    "recipe": ("--profiles", "traces"),
    "slaq_figures": ("--into", "figures"),
}
CHEAP = {  # seconds of processor time each; some of their keys
    "logs": {"lines_per_s", "p99_ms", "lost", "mib_per_stalled_follower"},
    "oasis": {"utility_vs_fifo", "utility_vs_drf", "ms_per_job"},
    "resync": {"connected_s", "resync_p95_s"},
}
SUPERVISED = """
import sys
from tests.bench import __main__ as bench
from tests.support import leftovers

leftovers.GOES_WITHIN_S = 0.5
bench.SAME_S = float(sys.argv[2])
sys.exit(bench.supervise([sys.executable, "-c", sys.argv[1]]))
"""


class ParsedError(Exception):
    """Carries the arguments as a benchmark understood them."""


def supervised(script: str, same_s: float = 60.0) -> subprocess.Popen[str]:
    """Start a script as `bin/bench` starts a benchmark.

    Args:
        script: of the benchmark.
        same_s: a second signal so soon counts as the first one.
    """
    command = ["sh", "-c", 'trap "" INT; exec "$0" "$@"']  # as jobs of a shell's background are
    command += [sys.executable, "-c", SUPERVISED, textwrap.dedent(script), str(same_s)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_accepts_quick_and_json(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise ParsedError(parse(parser, ["--quick", "--json", "FILE", *NEEDED.get(name, ())]))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)

    with pytest.raises(ParsedError) as understood:
        importlib.import_module(f"tests.bench.{name}").main()

    (chosen,) = understood.value.args
    assert (chosen.quick, chosen.json) == (True, Path("FILE"))


@pytest.mark.parametrize("name", figures.PLACES)
def test_a_table_replaces_the_one_in_its_page(name: str) -> None:
    page = figures.DOCS / figures.PLACES[name].page
    text = page.read_text(encoding="utf-8")

    new = figures.replaced(text, name, "| a |")

    assert f"<!-- figures: {name} -->\n| a |\n<!-- end -->" in new
    assert figures.replaced(new, name, "| a |") == new
    assert new.startswith(text.partition(f"<!-- figures: {name}")[0]), "the rest of the page stays"
    assert new.endswith(text.rpartition("<!-- end -->")[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_a_quick_benchmark_leaves_nothing(name: str, tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.bench", name, "--quick", "--json", str(written)]

    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert CHEAP[name] <= json.loads(written.read_text()).keys()


@pytest.mark.slow
def test_what_a_benchmark_leaves_is_named_and_removed() -> None:
    bench = supervised("""
        import subprocess, tempfile
        print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, tempfile.mkdtemp())
    """)

    out, err = bench.communicate()
    pid, folder = out.split()

    said = [line.split(": ", 1)[1] for line in err.splitlines() if line.startswith("left behind")]
    assert said == [f"process {pid}: sleep 1000 ", folder]
    assert bench.returncode == 1
    assert not Path(folder).parent.exists()
    assert not Path("/proc", pid).exists()


@pytest.mark.slow
def test_sigterm_interrupts_a_benchmark_so_that_it_can_clean_up() -> None:
    bench = supervised("""
        import time
        try:
            print("trains", flush=True)
            time.sleep(1000)
        finally:
            print("takes its cluster down", flush=True)
    """)
    assert bench.stdout is not None
    assert bench.stdout.readline() == "trains\n"

    bench.terminate()
    bench.send_signal(signal.SIGHUP)  # `timeout` sends two signals, too

    assert bench.communicate()[0] == "takes its cluster down\n"
    assert bench.returncode == 128 + signal.SIGINT


@pytest.mark.slow
def test_a_second_signal_ends_a_benchmark_that_does_not_stop() -> None:
    script = """
        import signal, time
        def wait(*_):
            print("goes on", flush=True)
        signal.signal(signal.SIGINT, wait)
        print("trains", flush=True)
        while True:
            time.sleep(1000)
    """
    bench = supervised(script, same_s=0.0)
    assert bench.stdout is not None
    assert bench.stdout.readline() == "trains\n"

    os.kill(bench.pid, signal.SIGINT)
    assert bench.stdout.readline() == "goes on\n"
    os.kill(bench.pid, signal.SIGINT)

    bench.communicate()
    assert bench.returncode == 128 + signal.SIGKILL
