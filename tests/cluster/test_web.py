"""The web page of a real cluster, in headless Chromium: followed, used, and without its controller."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from tests.chaos.site import FAKETIME
from tests.support.cluster import TOY, Cluster, looked, training_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
playwright = pytest.importorskip("playwright.sync_api", reason="`bin/test --all` installs it")
if shutil.which("chromium") is None:
    pytest.skip("needs Debian's chromium", allow_module_level=True)

LIMIT_MS: Final = 60_000
SIZES: Final = ((1440, "light"), (1440, "dark"), (390, "light"))
PAGES: Final = ("", "nodes", "scheduler", "sweeps", "usage", "compare", "login", "jobs/{job}")
SAYING: Final = TOY.replace("agent.epochs(4)", "agent.epochs(100_000)").replace("1.0, m", "0.05, m")
SERIOUS: Final = {"serious", "critical"}


class Page:
    """A page in a browser, and what went wrong there."""

    def __init__(self, browser: Any, url: str, **how: Any) -> None:
        self.url = url
        self.context = browser.new_context(**how)
        self.context.set_default_timeout(LIMIT_MS)
        self.tab = self.context.new_page()
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("console", self._said)
        self.tab.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _said(self, message: Any) -> None:
        if message.type == "error" and "ERR_" not in message.text:
            self.problems.append(message.text)

    def open(self, path: str) -> None:
        self.tab.goto(self.url + path)

    def until(self, script: str) -> None:
        self.tab.wait_for_function(f"() => {script}", timeout=LIMIT_MS)  # no eval

    def text(self, selector: str) -> str:
        return str(self.tab.locator(selector).inner_text())


class Desk:
    """A cluster with its page, and a browser."""

    def __init__(self, cluster: Cluster, browser: Any, url: str, pid: int) -> None:
        self.cluster, self.browser, self.url, self.pid = cluster, browser, url, pid
        self._pages: list[Page] = []

    def page(self, url: str = "", **how: Any) -> Page:
        self._pages.append(Page(self.browser, url or self.url, **how))
        return self._pages[-1]

    def close_pages(self) -> None:
        """Close all pages, which would go on to draw charts."""
        while self._pages:
            self._pages.pop().context.close()

    def log_in(self, page: Page, home: Path | None = None) -> None:
        where = ("--home", str(home)) if home else ()
        page.tab.goto(
            self.cluster.ones("web", "login", self.url, *where, "-o", "quiet").out.strip()
        )

    def key(self, name: str, role: str) -> Path:
        """The folder of a new key."""
        folder = self.cluster.base / name
        done = self.cluster.ones("key", "add", name, "--role", role, "--out", str(folder))
        assert done.code == 0, done.err
        return folder


@contextmanager
def serving(home: Path, *options: str, changed: str = "", **env: str) -> Iterator[tuple[str, int]]:
    """Address and pid of a page of its own; `changed` is Python that changes its limits."""
    code = f"from controlplane.cli.main import main\nfrom controlplane.web import app\n{changed}\nmain()"
    line = [sys.executable, "-c", code, "web", "--home", str(home), *options, "-o", "jsonl"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, env={**os.environ, **env}) as served:
        try:
            yield json.loads(served.stdout.readline())["url"], served.pid  # type: ignore[union-attr]
        finally:
            served.terminate()
            served.wait()
            for memory in Path("/dev/shm").glob(f"*faketime_*_{served.pid}"):  # noqa: S108
                memory.unlink()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("web")
    cluster = Cluster(folder / "home", folder / "jobs")
    cluster.up()
    with ExitStack() as stack:
        url, pid = stack.enter_context(serving(cluster.home, "--port", "0"))
        stack.callback(cluster.down)  # ends the page, too
        driver = stack.enter_context(playwright.sync_playwright())
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        stack.callback(browser.close)
        yield Desk(cluster, browser, url, pid)


@pytest.fixture(autouse=True)
def _closed_pages(desk: Desk) -> Iterator[None]:
    yield
    desk.close_pages()


@pytest.fixture(scope="module")
def job(desk: Desk) -> str:
    return training_job(
        desk.cluster, script=SAYING, batch_size=20, max_batch_size=40, max_local_batch=20,
        env={"OMP_NUM_THREADS": "1", "PAUSE_S": "0.05"},
    )  # fmt: skip


def axe(folder: Path) -> str:
    """The script of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    done = subprocess.run(
        ["npm", "pack", "axe-core"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"npm has no axe-core: {done.stderr[-200:]}")
    shutil.unpack_archive(next(folder.glob("axe-core-*.tgz")), folder)
    return (folder / "package" / "axe.min.js").read_text()


def test_every_view_is_accessible_and_asks_no_other_host(
    desk: Desk, job: str, tmp_path: Path
) -> None:
    script, faults = axe(tmp_path), []
    shots = Path(os.environ.get("ONES_SHOTS", tmp_path))  # keeps the pictures, if it is set
    for width, colours in SIZES:
        page = desk.page(viewport={"width": width, "height": 900}, color_scheme=colours)
        for path in PAGES:
            page.open(path.format(job=job))
            page.until("[...document.querySelectorAll('[data-chart]')].every(c => c.done)")
            page.tab.evaluate(script)
            found = page.tab.evaluate("axe.run()")["violations"]
            faults += [(path, one["id"]) for one in found if one["impact"] in SERIOUS]
            name = path.format(job=job).replace("/", "-") or "now"
            page.tab.screenshot(path=shots / f"{name}-{colours}-{width}.png", full_page=True)
        assert (page.problems, page.hosts) == ([], {desk.url.split("/")[2]})

    assert faults == []


def test_a_job_is_followed_through_a_rescale_and_its_output_is_searched(
    desk: Desk, job: str
) -> None:
    page = desk.page()
    page.open(f"jobs/{job}")
    desk.cluster.until(job, lambda shown: shown["state"] == "running")

    desk.cluster.ones("resize", job, "--slots", "2")

    page.until("document.querySelector('#head').innerText.includes('2 slots')")
    page.until("document.querySelectorAll('#workers tr').length === 2")
    page.tab.get_by_role("searchbox", name="Search the output").fill("step 7")
    page.tab.get_by_role("button", name="Show").click()
    page.until("document.querySelector('#log').innerText.includes('step 7')")
    lines = page.text("#log").strip().splitlines()
    assert [line for line in lines if "step 7" not in line] == []
    assert page.problems == []


def test_the_chart_of_slots_goes_back_beyond_what_the_page_holds(desk: Desk, job: str) -> None:
    few = "from controlplane.web import mirror, past; mirror.MAX_EVENTS = 1; past.PAGE = 10"
    bars = "document.querySelector('.chart').doc?.get_model_by_name('bars').data"
    desk.cluster.until(job, lambda shown: shown["running_s"] > 30.0)  # 20 pixels are 10 s
    with serving(desk.key("historian", "viewer"), "--port", "0", changed=few) as (url, _):
        page = desk.page(url)
        page.open("?span=10+min")
        page.until("document.querySelector('.chart').done")
        box = page.tab.locator(".chart").bounding_box()
        page.tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        with page.tab.expect_response(lambda reply: "from=" in reply.url) as moved:
            page.tab.mouse.down()
            page.tab.mouse.move(box["x"] + box["width"] / 2 + 20, box["y"] + box["height"] / 2)
            page.tab.mouse.up()

        begin = moved.value.json()["bars"]["begin"]
        page.until(f"JSON.stringify({bars}?.begin) === {json.dumps(begin)!r}.replaceAll(' ', '')")
        assert job in moved.value.json()["bars"]["job"]
        assert page.problems == []


def test_a_user_acts_after_a_login_and_nobody_without_one(desk: Desk, job: str) -> None:
    page = desk.page()
    page.open(f"jobs/{job}")
    assert page.tab.locator(".actions").count() == 0
    refused = page.context.request.post(f"{desk.url}jobs/{job}/act", form={"action": "pause"})
    assert refused.status == 403

    desk.log_in(page)
    page.open(f"jobs/{job}")
    page.tab.get_by_role("button", name="Pause").click()

    page.until("document.querySelector('#head').innerText.startsWith('paused')")
    page.tab.get_by_role("button", name="Resume").click()
    desk.cluster.until(job, lambda shown: shown["state"] == "running")
    page.tab.get_by_role("button", name="Log out").click()
    page.open(f"jobs/{job}")
    assert page.tab.locator(".actions").count() == 0


def test_a_revoked_login_is_refused_on_an_open_page(desk: Desk, job: str) -> None:
    page = desk.page()
    desk.log_in(page)
    page.open(f"jobs/{job}")
    keys = desk.cluster.ones("key", "list", "-o", "json").json
    *_, login = [key for key in keys if key["kept"] == "online" and key["state"] == "valid"]

    desk.cluster.ones("key", "revoke", login["public"])
    page.tab.get_by_role("button", name="Pause").click()

    page.tab.locator("main .problem").wait_for()
    assert "no longer authorised" in page.text("main .problem")


def test_a_page_survives_its_controller(desk: Desk, job: str) -> None:
    page = desk.page()
    page.open("")
    page.until(f"document.getElementById('running-{job}')")
    os.kill(desk.cluster.up()["controller"], signal.SIGKILL)

    page.until("document.querySelector('#status.problem')")
    assert page.tab.locator(f"#running-{job}").count() == 1  # as it was
    assert page.context.request.get(f"{desk.url}healthz").status == 503
    desk.cluster.up()

    page.until("!document.querySelector('#status.problem')")
    assert page.context.request.get(f"{desk.url}healthz").status == 200
    assert page.problems == []


def test_a_page_that_ends_with_open_streams_says_nothing(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(desk.key("brief", "viewer"), "--port", "0") as (url, _):
        page = desk.page(url)
        page.open("nodes")
        page.until("document.querySelectorAll('#nodes tr').length")

    assert capfd.readouterr().err == ""


def test_a_browser_that_leaves_does_not_end_the_page(desk: Desk) -> None:
    status = Path(f"/proc/{desk.pid}/status").read_text()
    (ignored,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))

    assert int(ignored, 16) & 1 << (signal.SIGPIPE - 1)


# --- hostile cases


class Wire:
    """A way between a browser and a page that can be cut without a word, as by a host that sleeps."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rsplit(":", 1)[1].strip("/"))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/"
        self._asleep = False
        self._cut: set[socket.socket] = set()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                self._cut |= {near, far} if self._asleep else set()
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._copy, args=pair))
                    self._threads[-1].start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 16):
                if source not in self._cut:
                    sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def sleep(self) -> None:
        """Let nothing through any more, on no connection."""
        self._asleep = True
        self._cut.update(self._ends)

    def wake(self) -> None:
        """Let new connections work; those of before stay silent."""
        self._asleep = False

    def close(self) -> None:
        for end in (self._listening, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listening.close()


def test_a_page_whose_connection_died_unnoticed_catches_up(desk: Desk, job: str) -> None:
    viewer = desk.key("sleeper", "viewer")
    with ExitStack() as stack:
        url, _ = stack.enter_context(
            serving(viewer, "--port", "0", changed="app.HEARTBEAT_S = 1.0")
        )
        wire = Wire(url)
        stack.callback(wire.close)
        page = desk.page(wire.url)
        page.open("")
        page.until(f"document.getElementById('running-{job}')")
        other = desk.cluster.submit(SAYING, slots=[1, 4], stop={"epochs": 100_000})
        page.until(f"document.getElementById('running-{other}')")
        wire.sleep()
        desk.cluster.ones("cancel", other)
        desk.cluster.until(other, lambda shown: shown["state"] == "cancelled")
        page.until("document.querySelector('#status.problem')?.innerText.includes('reconnects')")
        assert page.tab.locator(f"#running-{other}").count() == 1  # as it was
        wire.wake()
        page.until(f"document.getElementById('ended-{other}')")
        page.until(f"!document.getElementById('running-{other}')")
        page.until("!document.querySelector('#status.problem')")
        assert page.problems == []


def test_a_frozen_tab_catches_up_when_it_is_shown_again(desk: Desk, job: str) -> None:
    page = desk.page()
    page.open("")
    page.until(f"document.getElementById('running-{job}')")
    other = desk.cluster.submit(SAYING, slots=[1, 4], stop={"epochs": 100_000})
    page.until(f"document.getElementById('running-{other}')")
    renderers = [
        one for one in psutil.Process().children(recursive=True)
        if "--type=renderer" in one.cmdline()
    ]  # fmt: skip
    for one in renderers:
        one.suspend()
    try:
        desk.cluster.ones("cancel", other)
        desk.cluster.until(other, lambda shown: shown["state"] == "cancelled")
    finally:
        for one in renderers:
            one.resume()

    page.until(f"document.getElementById('ended-{other}')")
    page.until(f"!document.getElementById('running-{other}')")
    assert page.problems == []


STREAMS: Final = 1000


def test_a_thousand_streams_are_bounded_and_leave_the_page_usable(desk: Desk) -> None:
    viewer = desk.key("crowd", "viewer")
    with ExitStack() as stack:
        url, pid = stack.enter_context(
            serving(viewer, "--port", "0", changed=f"app.MAX_STREAMS = {STREAMS}")
        )
        page = desk.page(url)
        page.open("nodes")
        page.until("document.querySelectorAll('#nodes tr').length")
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))
        before = psutil.Process(pid).memory_info().rss
        streams = []
        for _ in range(STREAMS):
            one = stack.enter_context(socket.create_connection(address))
            one.sendall(b"GET /live/now HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            streams.append(one)
        heads = [one.recv(1 << 16).split(b"\r\n")[0] for one in streams]
        refused = page.context.request.get(f"{url}live/now")

        assert Counter(heads) == {
            b"HTTP/1.1 200 OK": STREAMS - 1,
            b"HTTP/1.1 503 Service Unavailable": 1,
        }
        assert (refused.status, refused.text()) == (503, "too many open pages\n")
        begun = time.monotonic()
        page.open("scheduler")
        took, grown = time.monotonic() - begun, psutil.Process(pid).memory_info().rss - before
        said = f"{grown / STREAMS / 1000:.0f} kB for each stream, another page in {took:.2f} s"
        assert (took < 5.0, grown < 200 << 20) == (True, True), said
        logging.getLogger("web").info(said)


def test_two_users_of_one_browser_never_act_as_each_other(desk: Desk, job: str) -> None:
    bob = desk.key("bob", "user")
    mine, his = desk.page(), desk.page()
    desk.log_in(mine)
    desk.log_in(his, bob)
    for page in (mine, his):
        page.open(f"jobs/{job}")

    assert [page.text(".who").split(" (")[0] for page in (mine, his)] == ["root", "bob"]
    his.tab.get_by_role("button", name="Pause").click()
    his.tab.locator("main .problem").wait_for()
    assert his.text("main .problem") == f"no job {job!r}"  # the page may see it, he may not

    desk.log_in(mine, bob)  # the other tab still shows root's form
    old = mine.context.new_page()
    mine.open(f"jobs/{job}")
    old.goto(f"{desk.url}jobs/{job}")
    desk.log_in(mine)
    old.get_by_role("button", name="Pause").click()
    old.locator("main .problem").wait_for()
    assert "earlier login" in old.locator("main .problem").inner_text()
    assert desk.cluster.show(job)["state"] == "running"


DAY_S: Final = 86_400


def ended(desk: Desk, folder: Path, *line: str) -> str:
    """The job of a program that has ended."""
    job = desk.cluster.run(folder, *line, options=("--detach", "-o", "quiet")).out.strip()
    desk.cluster.wait(job)
    return job


@pytest.mark.parametrize("days", [-1, 1])
def test_a_browser_with_a_wrong_clock_shows_the_controllers_ages(
    desk: Desk, tmp_path: Path, days: int
) -> None:
    done = ended(desk, tmp_path, "true")
    page = desk.page()
    page.context.clock.set_fixed_time(time.time() + days * DAY_S)  # timers go on
    page.open("")
    page.until(f"document.getElementById('ended-{done}')")

    said = page.text(f"#ended-{done} time")
    assert re.fullmatch(r"\d+ (s|min) ago", said), said


@pytest.mark.parametrize("days", [-1, 1])
@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime")
def test_a_page_whose_host_has_a_wrong_clock_shows_the_controllers_times(
    desk: Desk, tmp_path: Path, days: int
) -> None:
    done = ended(desk, tmp_path, "true")
    viewer = desk.key(f"clock{days + 1}", "viewer")
    wrong = {
        "LD_PRELOAD": str(FAKETIME), "FAKETIME": f"{days:+d}d", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    with serving(viewer, "--port", "0", **wrong) as (url, _):
        page = desk.page(url)
        page.open("")
        page.until(f"document.getElementById('ended-{done}')")

        said = page.text(f"#ended-{done} time")
        assert re.fullmatch(r"\d+ (s|min) ago", said), said
        shown = page.context.request.get(f"{url}charts/gantt?data=1&span=1+h").json()
        assert abs(shown["time"]["end"] / 1000 - time.time()) < 60.0


HOSTILE: Final = """
import os
os.write(1, b"<script>hacked = 1</script><img src=x onerror=hacked=1>\\n")
os.write(1, "\\u202etxt.exe\\u2066 \\x1b[2J\\x00\\x07\\n".encode())
os.write(1, b"x" * 10_000_000 + b"\\nlast\\n")
"""
HACKED: Final = "typeof hacked"


def test_output_names_and_metrics_of_a_hostile_job_are_only_text(
    desk: Desk, tmp_path: Path
) -> None:
    bad = "<script>hacked=1</script>"
    reporting = SAYING.replace("agent.report(mse=loss.item())", f"agent.report(**{{{bad!r}: 1.0}})")
    (tmp_path / "loud.py").write_text(HOSTILE)
    loud = ended(desk, tmp_path, "python", "loud.py")
    trains = training_job(desk.cluster, script=reporting, batch_size=20, max_batch_size=40)
    desk.cluster.until(trains, lambda shown: shown["epoch"] >= 1)
    page = desk.page()
    desk.log_in(page)

    page.open(f"jobs/{loud}")
    page.until("document.querySelector('#log').innerText.includes('last')")
    lines = page.tab.locator("#log > div").all_inner_texts()
    page.open(f"jobs/{trains}")
    page.until("document.querySelector('#facts').innerText.includes('hacked=1')")

    assert lines[0] == "<script>hacked = 1</script><img src=x onerror=hacked=1>"
    assert not {char for line in lines for char in line} & set("\x00\x07\x1b\u202e\u2066")
    assert [len(line) < 5000 for line in lines] == [True] * 4
    assert (page.tab.evaluate(HACKED), page.problems) == ("undefined", [])
    desk.cluster.ones("cancel", trains)


NGINX: Final = """
daemon off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 64; }}
http {{
    access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    server {{
        listen 127.0.0.1:{port};
        location /gpus/ones/ {{
            proxy_pass http://127.0.0.1:{page};
            proxy_set_header Host $host;
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
def test_a_page_behind_nginx_works_below_its_prefix(desk: Desk, job: str, tmp_path: Path) -> None:
    viewer, port, inner = desk.key("proxied", "viewer"), free_port(), free_port()
    address = f"http://127.0.0.1:{port}/gpus/ones"
    (tmp_path / "conf").write_text(NGINX.format(folder=tmp_path, port=port, page=inner))
    with ExitStack() as stack:
        stack.enter_context(serving(viewer, "--port", str(inner), "--public-url", address))
        proxy = stack.enter_context(
            subprocess.Popen(
                ["nginx", "-p", tmp_path, "-e", tmp_path / "errors", "-c", tmp_path / "conf"]
            )
        )
        stack.callback(proxy.terminate)
        page = desk.page(f"{address}/")
        looked(lambda: is_open(port))
        page.tab.goto(desk.cluster.ones("web", "login", address, "-o", "quiet").out.strip())
        (cookie,) = page.context.cookies()
        assert (cookie["path"], page.tab.url) == ("/gpus/ones/", f"{address}/")

        page.open(f"jobs/{job}")
        page.until("[...document.querySelectorAll('[data-chart]')].every(c => c.done)")
        page.until("document.querySelector('#log').innerText.includes('step')")
        for button, state in (("Pause", "paused"), ("Resume", "running")):
            page.tab.get_by_role("button", name=button).click()
            page.until(f"document.querySelector('#head')?.innerText.startsWith({state!r})")
        page.tab.get_by_role("button", name="Log out").click()
        page.tab.get_by_role("link", name="read only").wait_for()
        assert (page.problems, page.hosts) == ([], {f"127.0.0.1:{port}"})


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
