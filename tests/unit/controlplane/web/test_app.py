"""The web server without a cluster: rights, headers, logins, and other hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

import pytest
from starlette.testclient import TestClient

from controlplane.client.connection import Home
from controlplane.web import app, sessions
from controlplane.web.app import WebPage
from controlplane.web.mirror import State
from controlplane.web.sessions import Session
from schemas.errors import DeniedError, UnknownJobError
from schemas.ids import JobId, Seconds
from schemas.wire.client import Cluster, Explanation, JobDetail, JobSummary, Usage
from tests.unit.controlplane.web.test_views import example, summary

NAMES: Final = frozenset({"testserver"})
PROBLEM: Final = re.compile(r'<p class="problem">(.*?)</p>')


class Controller:
    """What a page asks, and what its users want changed."""

    def __init__(self, role: str = "viewer") -> None:
        self.done: list[tuple[Any, ...]] = []
        self.role = role

    async def cluster(self) -> Cluster:
        return example(Cluster, user="ann", role=self.role)

    async def job(self, job: str) -> JobDetail:
        if job != "digits-1":
            raise UnknownJobError(JobId(job))
        return example(JobDetail, summary=summary())

    async def explain(self, job: str) -> Explanation:
        return Explanation(job=JobId(job), state="running", decisions=())

    async def usage(self, since: float) -> Usage:
        self.done.append(("usage",))
        return Usage(since=Seconds(since), until=Seconds(since), jobs=())

    async def history(self, most: int) -> list[JobSummary]:
        self.done.append(("history", most))
        return [summary(submitted_at=Seconds(10.0), ended_at=Seconds(40.0))]

    async def pause(self, job: str) -> None:
        self.done.append(("pause", job))

    async def resize(self, job: str, slots: int) -> None:
        self.done.append(("resize", job, slots))

    async def cancel(self, job: str) -> None:
        raise DeniedError(f"you may not change {job}: it belongs to bob", "ask its owner")

    async def output_pages(self, job: str, rank: int | None, **how: Any) -> Any:
        self.done.append(("output", job, rank, how["matching"]))
        yield [SimpleNamespace(rank=0, text="loss 0.5\x1b[2J", end="\n")]


class Browser:
    """A browser on a page of its own, whose cluster is a `Controller`."""

    def __init__(self, folder: Path, prefix: str = "/", role: str = "viewer") -> None:
        home = Home(folder, "tcp://127.0.0.1:1", folder / "a", folder / "b")
        self.page = WebPage(home, prefix=prefix)
        self.controller = Controller(role)
        self.page.mirror._client = self.controller  # type: ignore[assignment]
        self.page.mirror.state = State(
            version=1, at=time.monotonic(), problem="", jobs=(summary(),),
            cluster=example(Cluster, role=role),
        )  # fmt: skip
        self.http = TestClient(self.page.app(NAMES), follow_redirects=False)

    def log_in(self) -> dict[str, str]:
        """Log ann in, and return the hidden field of forms."""
        self.page.sessions._sessions["token"] = Session(
            user="ann", role="user", csrf="secret", ends=time.monotonic() + 60.0,
            client=self.controller, stack=AsyncExitStack(),  # type: ignore[arg-type]
        )  # fmt: skip
        self.http.cookies.set(app.COOKIE, "token")
        return {"csrf": "secret"}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Browser]]:
    made: list[Browser] = []

    def open_browser(**how: str) -> Browser:
        made.append(Browser(tmp_path, **how))
        return made[-1]

    yield open_browser
    for browser in made:
        browser.page.sessions._folder.cleanup()


@pytest.fixture
def browser(opened: Callable[..., Browser]) -> Browser:
    return opened()


@pytest.mark.parametrize(
    "path", ["/", "/nodes", "/scheduler", "/sweeps", "/compare", "/login", "/x"]
)
def test_every_reply_forbids_scripts_frames_and_other_hosts(browser: Browser, path: str) -> None:
    reply = browser.http.get(path)

    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert "frame-ancestors 'none'" in policy
    assert (reply.headers["x-content-type-options"], reply.headers["cache-control"]) == (
        "nosniff", "no-store",
    )  # fmt: skip
    assert not re.search(r'(src|href|action)="(https?:)?//', reply.text)
    assert not re.search(r"<script(?! src| type=.application/json)|\son\w+=", reply.text)


def test_a_foreign_name_of_the_host_is_refused(browser: Browser) -> None:
    reply = browser.http.get("/", headers={"host": "evil.example:7780"})

    assert (reply.status_code, "evil.example" in reply.text) == (421, True)


def test_health_is_that_of_the_connection_to_the_controller(browser: Browser) -> None:
    assert browser.http.get("/healthz").status_code == 200
    browser.page.mirror.state = State()
    assert browser.http.get("/healthz").status_code == 503


def test_all_links_lie_below_the_prefix(opened: Callable[..., Browser]) -> None:
    browser = opened(prefix="/gpus/ones")

    text = browser.http.get("/gpus/ones/jobs/digits-1").text

    links = re.findall(r'(?:src|href|action|data-\w+)="(/[^"]*)"', text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("/gpus/ones/")] == []
    assert browser.http.get("/").status_code == 404


def test_an_unknown_job_is_not_found(browser: Browser) -> None:
    reply = browser.http.get("/jobs/nobody-7")

    assert (reply.status_code, PROBLEM.findall(reply.text)) == (404, ["no job &#39;nobody-7&#39;"])


# --- actions

PAUSE: Final = {"action": "pause"}


def test_who_is_not_logged_in_sees_no_buttons_and_changes_nothing(browser: Browser) -> None:
    page = browser.http.get("/jobs/digits-1")
    reply = browser.http.post("/jobs/digits-1/act", data=PAUSE)

    assert ("<button" in page.text and "Pause" in page.text, reply.status_code) == (False, 403)
    assert browser.controller.done == []


@pytest.mark.parametrize(
    ("fields", "done"),
    [
        (PAUSE, ("pause", "digits-1")),
        ({"action": "resize", "slots": "3"}, ("resize", "digits-1", 3)),
    ],
    ids=str,
)
def test_a_user_changes_a_job_with_the_own_key(
    browser: Browser, fields: dict[str, str], done: tuple[Any, ...]
) -> None:
    token = browser.log_in()

    reply = browser.http.post("/jobs/digits-1/act", data=fields | token)

    assert (reply.status_code, reply.headers["location"]) == (303, "/jobs/digits-1")
    assert browser.controller.done == [done]


@pytest.mark.parametrize(
    ("fields", "headers", "status"),
    [
        (PAUSE, {}, 403),  # without the token
        (PAUSE | {"csrf": "guessed"}, {}, 403),
        (PAUSE | {"csrf": "secret"}, {"origin": "https://evil.example"}, 403),
        ({"csrf": "secret", "action": "explode"}, {}, 400),
        ({"csrf": "secret", "action": "resize", "slots": "-1"}, {}, 400),
        ({"csrf": "secret", "action": "cancel"}, {}, 403),  # the controller's own refusal
    ],
    ids=str,
)
def test_a_forged_or_wrong_form_changes_nothing(
    browser: Browser, fields: dict[str, str], headers: dict[str, str], status: int
) -> None:
    browser.log_in()

    reply = browser.http.post("/jobs/digits-1/act", data=fields, headers=headers)

    assert (reply.status_code, browser.controller.done) == (status, [])


def test_a_form_from_the_address_of_the_proxy_is_from_this_page(browser: Browser) -> None:
    browser.page._public = "gpus.example:8443"
    origin = {"origin": "https://gpus.example:8443", "host": "testserver"}  # it drops the port

    reply = browser.http.post("/jobs/digits-1/act", data=PAUSE | browser.log_in(), headers=origin)

    assert (reply.status_code, browser.controller.done) == (303, [("pause", "digits-1")])


def test_a_session_ends_by_itself_and_by_a_logout(browser: Browser) -> None:
    token = browser.log_in()
    assert "ann (user)" in browser.http.get("/").text

    assert browser.http.post("/logout", data=token).status_code == 303
    assert "read only" in browser.http.get("/").text
    browser.log_in()
    browser.page.sessions._sessions["token"].ends = time.monotonic() - 1.0
    assert "read only" in browser.http.get("/").text


# --- logins


def test_a_link_works_once_and_only_for_a_while(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Connection(Controller):
        def __init__(self, home: Home) -> None:
            assert home.key.stat().st_mode & 0o777 == 0o600
            super().__init__("user")

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(sessions, "Client", Connection)
    first, second = (browser.http.post("/login/begin").json() for _ in range(2))
    assert len(first["public"]) == 40

    reply = browser.http.get(f"/login?code={first['code']}")

    assert reply.status_code == 303
    cookie = reply.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age="))
    assert browser.http.get(f"/login?code={first['code']}").status_code == 403
    late = time.monotonic() + sessions.PENDING_S + 1.0
    monkeypatch.setattr(sessions.time, "monotonic", lambda: late)
    assert browser.http.get(f"/login?code={second['code']}").status_code == 403
    (kept,) = Path(browser.page.sessions._folder.name).iterdir()  # of the session
    assert (kept / "login.key_secret").exists()


def test_at_most_a_hundred_logins_wait(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_PENDING", 2)

    replies = [browser.http.post("/login/begin").status_code for _ in range(3)]

    assert replies == [200, 200, 503]


# --- output


@pytest.mark.parametrize(("role", "shown"), [("viewer", True), ("admin", False)])
def test_output_is_shown_with_a_viewers_key_only(
    opened: Callable[..., Browser], role: str, *, shown: bool
) -> None:
    browser = opened(role=role)

    text = browser.http.get("/jobs/digits-1/log?search=a.b&rank=0").text

    assert (text.splitlines()[0] == 'data: [[0, "loss 0.5\\ufffd[2J", "\\n"]]') is shown
    assert browser.controller.done == [("output", "digits-1", 0, "a\\.b")] * shown


def test_a_user_who_is_logged_in_reads_output_with_the_own_key(
    opened: Callable[..., Browser],
) -> None:
    browser = opened(role="admin")
    browser.log_in()

    assert "loss 0.5" in browser.http.get("/jobs/digits-1/log").text


def test_open_pages_are_limited(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_STREAMS", 0)

    assert browser.http.get("/live/now").status_code == 503


# --- comparison


def test_visits_share_what_the_controller_replied(browser: Browser) -> None:
    with browser.http:
        for _ in range(2):
            assert browser.http.get("/usage").status_code == 200
            assert "this cluster" in browser.http.post("/compare", files={"real": (None, "1")}).text

    assert browser.controller.done == [("usage",), ("history", 1000)]


@pytest.mark.parametrize("dark", [False, True])
def test_a_comparison_has_the_colours_of_its_browser(browser: Browser, *, dark: bool) -> None:
    form = {
        "results": ("a.json", b'{"policy": "fifo", "jct_s": {"a-1": 9.0}}'),
        "dark": (None, str(int(dark))),
    }

    assert ("#15181e" in browser.http.post("/compare", files=form).text) is dark


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"policy": "fifo", "jct_s": {"a-1": 90.0, "a-2": 30.0}}', "fifo.json: fifo"),
        (b'{"results": [{"policy": "ones", "jct_s": {"a-1": 7.0}}]}', "fifo.json: ones"),
        (b"{", "results: fifo.json has no results: "),
        (b'{"jct_s": 3}', "results: fifo.json has no results: "),
        (b'{"policy": "<script>", "jct_s": {"a-1": 7.0}}', "fifo.json: &lt;script&gt;"),
    ],
    ids=str,
)
def test_results_of_simulations_are_compared_or_refused(
    browser: Browser, content: bytes, said: str
) -> None:
    reply = browser.http.post("/compare", files={"results": ("fifo.json", content)})

    assert (reply.status_code, said in reply.text) == (200, True)
    assert "<script>" not in reply.text
