"""Web server: pages, live changes, charts, logins and actions."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import bokeh
import msgspec
import psutil
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.client.allocations import Window
from controlplane.client.client import Client
from controlplane.client.connection import Home
from controlplane.client.formats import second
from controlplane.web import charts
from controlplane.web.mirror import ClusterMirror, State
from controlplane.web.sessions import SESSION_S, Session, Sessions
from controlplane.web.views import (
    FOLDER,
    NOTHING,
    News,
    Parts,
    Views,
    environment,
    has_rungs,
    plain,
)
from schemas.errors import (
    BadFieldError,
    DeniedError,
    OnesError,
    UnavailableError,
    UnknownJobError,
    UnreachableError,
)
from schemas.ids import LAST, JobId

COOKIE: Final = "ones-session"
PAGES: Final = (
    ("", "Now"), ("nodes", "Nodes"), ("scheduler", "Scheduler"), ("sweeps", "Sweeps"),
    ("usage", "Usage"), ("compare", "Compare"),
)  # fmt: skip
SPANS: Final = {"10 min": 600.0, "1 h": 3600.0, "6 h": 21_600.0, "24 h": 86_400.0}
USAGE_SPANS: Final = {"1 d": 86_400.0, "7 d": 604_800.0, "30 d": 2_592_000.0}
HEARTBEAT_S: Final = 15.0  # a stream without news says so
MAX_STREAMS: Final = 2000  # open pages
MAX_RESULTS_BYTES: Final = 32 << 20  # of the results to compare
MAX_RESULTS: Final = 24
MAX_FORM_BYTES: Final = 1 << 16
LAST_LINES: Final = 500  # of the output, at first
LONGEST_LINE: Final = 4000  # characters
HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
STATUS: Final[tuple[tuple[type[OnesError], HTTPStatus], ...]] = (
    (UnknownJobError, HTTPStatus.NOT_FOUND),
    (DeniedError, HTTPStatus.FORBIDDEN),
    (BadFieldError, HTTPStatus.BAD_REQUEST),
    (UnreachableError, HTTPStatus.SERVICE_UNAVAILABLE),
    (UnavailableError, HTTPStatus.SERVICE_UNAVAILABLE),
)


class _Result(msgspec.Struct):
    """A simulation's result, as far as it is compared."""

    policy: str
    jct_s: dict[str, float]  # completion time of each job


class SafeHeaders:
    """Middleware that adds the security headers, and refuses a foreign `Host`.

    Without this check, a page of another site could read this one by DNS rebinding.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts  # empty: any

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = urlsplit(f"//{names.get(b'host', '')}").hostname or ""
        if self._hosts and host not in self._hosts:
            said = f"this page is not served as {host!r}; name it with `ones web --public-url`"
            await PlainTextResponse(said, HTTPStatus.MISDIRECTED_REQUEST)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                present = {name for name, _ in message["headers"]}
                if b"cache-control" not in present and not scope["path"].startswith("/static"):
                    more.append((b"cache-control", b"no-store"))
                message["headers"] = [*message["headers"], *more]
            await send(message)

        await self._app(scope, receive, with_headers)


class WebPage:
    """The page of one cluster."""

    def __init__(
        self, home: Home, *, prefix: str = "/", secure: bool = False, public: str = ""
    ) -> None:
        self.mirror = ClusterMirror(home)
        self.sessions = Sessions(home)
        self._base = f"/{prefix.strip('/')}/".replace("//", "/")
        self._public = public  # host and port of a reverse proxy; then all peers are the proxy
        self._secure = secure  # cookies over HTTPS only
        self._templates = environment()
        self._views = Views(self._templates, self._base)
        self._news = News()
        self._closing = asyncio.Event()
        self._streams = 0

    def app(self, hosts: frozenset[str] = frozenset()) -> Starlette:
        """Return the ASGI application. `hosts` are the names under which it is served."""
        static = Path(bokeh.__file__).parent / "server" / "static" / "js"
        routes = [
            Route("/healthz", self.healthz),
            Route("/", self.now),
            Route("/nodes", self.nodes),
            Route("/scheduler", self.scheduler),
            Route("/sweeps", self.sweeps),
            Route("/sweeps/{job}", self.sweep),
            Route("/usage", self.usage),
            Route("/compare", self.compare, methods=["GET", "POST"]),
            Route("/jobs/{job}", self.job),
            Route("/jobs/{job}/log", self.output),
            Route("/jobs/{job}/act", self.act, methods=["POST"]),
            Route("/live/{view}", self.live),
            Route("/live/{view}/{job}", self.live),
            Route("/charts/{chart}", self.chart),
            Route("/charts/{chart}/{job}", self.chart),
            Route("/login", self.login),
            Route("/login/begin", self.begin_login, methods=["POST"]),
            Route("/logout", self.logout, methods=["POST"]),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
            Mount("/bokeh", StaticFiles(directory=static)),
        ]
        inside = self._base.rstrip("/")
        return Starlette(
            routes=[Mount(inside, routes=routes)] if inside else routes,
            middleware=[Middleware(SafeHeaders, hosts=hosts)],
            lifespan=self._lifespan,
            exception_handlers={OnesError: self._refused},
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        follower = asyncio.create_task(self.mirror.run())
        try:
            yield
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
            await self.sessions.close()

    def close(self) -> None:
        """End all streams, so that the server can end."""
        self._closing.set()

    async def _refused(self, request: Request, error: Exception) -> Response:
        status = next(
            (code for kind, code in STATUS if isinstance(error, kind)),
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )
        message, hint = getattr(error, "message", str(error)), getattr(error, "hint", "")
        return await self._page(
            request, "message.html", title=status.phrase, status=status,
            message=plain(message), hint=plain(hint),
        )  # fmt: skip

    # --- pages

    async def healthz(self, _: Request) -> Response:
        """Return 200 while the controller replies, else 503."""
        problem = self.mirror.state.problem
        status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
        return PlainTextResponse(f"{problem or 'ok'}\n", status)

    async def now(self, request: Request) -> Response:
        """Return the first page."""
        window, shown, until = self._window(request)
        span_s = SPANS[shown]
        query = {"span": shown} | ({"until": f"{until:.0f}"} if until else {})
        step = {"span": shown, "until": f"{window.end - span_s / 2:.0f}"}
        after = {"span": shown, "until": f"{window.end + span_s / 2:.0f}"}
        state = await self.mirror.fresh()
        return await self._page(
            request, "now.html", title="Now", here="", parts=self._views.now(state),
            stream=f"{self._base}live/now", gantt=f"{self._base}charts/gantt?{urlencode(query)}",
            spans=[(name, f"?{urlencode({'span': name})}") for name in SPANS], span_shown=shown,
            earlier=f"?{urlencode(step)}", later=f"?{urlencode(after)}" if until else "",
        )  # fmt: skip

    async def job(self, request: Request) -> Response:
        """Return the page of a job."""
        name = JobId(request.path_params["job"])
        state = await self.mirror.fresh()
        found = await self.mirror.job(name)
        session = await self._session(request)
        return await self._page(
            request, "job.html", title=name, here=None, job=name,
            parts=self._views.job(state, found), actions=session is not None,
            stream=f"{self._base}live/job/{quote(name)}",
        )  # fmt: skip

    async def nodes(self, request: Request) -> Response:
        """Return the page of nodes."""
        state = await self.mirror.fresh()
        return await self._page(
            request, "nodes.html", title="Nodes", here="nodes", parts=self._views.nodes(state),
            stream=f"{self._base}live/nodes",
        )  # fmt: skip

    async def scheduler(self, request: Request) -> Response:
        """Return the page of the scheduler."""
        state = await self.mirror.fresh()
        return await self._page(
            request, "scheduler.html", title="Scheduler", here="scheduler",
            parts=self._views.scheduler(state), stream=f"{self._base}live/scheduler",
        )  # fmt: skip

    async def sweeps(self, request: Request) -> Response:
        """Return the list of sweeps."""
        state = await self.mirror.fresh()
        return await self._page(
            request, "sweeps.html", title="Sweeps", here="sweeps",
            parts=self._views.sweeps(state), stream=f"{self._base}live/sweeps",
        )  # fmt: skip

    async def sweep(self, request: Request) -> Response:
        """Return the page of a sweep."""
        name = request.path_params["job"]
        detail = await self.mirror.sweep(JobId(name))
        return await self._page(
            request, "sweep.html", title=name, job=name,
            rungs=has_rungs(detail),
            parts=self._views.sweep(self.mirror.state, detail),
            stream=f"{self._base}live/sweep/{quote(name)}",
        )  # fmt: skip

    async def compare(self, request: Request) -> Response:
        """Draw uploaded results of simulations, and the jobs that ended here."""
        series: dict[str, list[float]] = {}
        problem, dark = "", False
        if request.method == "POST":
            try:
                series, dark = await self._compared(request)
            except BadFieldError as error:
                problem = plain(error)
        drawn = charts.shares(series, "completion time, s") if series else None
        html = json.dumps(charts.document(drawn, dark=dark)) if drawn else ""
        return await self._page(
            request, "compare.html", title="Compare", here="compare", problem=problem,
            drawn=Markup(html.replace("<", "\\u003c")),  # noqa: S704 - JSON in a data block
            rows=self._views.compared_rows(series),
        )  # fmt: skip

    async def _compared(self, request: Request) -> tuple[dict[str, list[float]], bool]:
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_RESULTS_BYTES:
            what = f"results: more than {MAX_RESULTS_BYTES >> 20} MiB"
            raise BadFieldError(what, "choose fewer files", "results")
        series: dict[str, list[float]] = {}
        async with request.form(max_files=MAX_RESULTS) as form:
            for file in form.getlist("results"):
                if not isinstance(file, str) and file.filename:
                    series |= results_in(await file.read(), plain(file.filename))
            real, dark = form.get("real") == "1", form.get("dark") == "1"
        if real:
            ended = await self.mirror.ended_jobs()
            times = [job.ended_at - job.submitted_at for job in ended if job.ended_at]
            series |= {"this cluster": times} if times else {}
        if not series:
            raise BadFieldError("results: none was chosen", "choose a file", "results")
        return series, dark

    async def usage(self, request: Request) -> Response:
        """Return slot hours by project and user."""
        shown = request.query_params.get("span", "7 d")
        shown = shown if shown in USAGE_SPANS else "7 d"
        used = await self.mirror.usage(USAGE_SPANS[shown])
        return await self._page(
            request, "usage.html", title="Usage", here="usage",
            rows=self._views.usage_rows(used.jobs), span_shown=shown,
            spans=[(name, f"?{urlencode({'span': name})}") for name in USAGE_SPANS],
        )  # fmt: skip

    async def _page(
        self, request: Request, template: str, *, parts: Parts | None = None,
        status: int = HTTPStatus.OK, **values: Any,
    ) -> Response:  # fmt: skip
        state, session = self.mirror.state, await self._session(request)
        shown = parts if parts is not None else self._views.common(state)

        def inside(parent: str) -> Markup:
            return Markup("").join(Markup(p.html) for p in shown.values() if p.parent == parent)  # noqa: S704

        context: dict[str, Any] = {
            "base": self._base, "pages": PAGES, "here": None, "stream": "", "inside": inside,
            "history": state.history, "now": state.now(), "silence": 3 * HEARTBEAT_S,
            "csrf": session.csrf if session else "",
            "who": f"{session.user} ({session.role})" if session else "",
        }  # fmt: skip
        html = self._templates.get_template(template).render(context | values)
        return Response(html, status, media_type="text/html")

    # --- live changes

    async def live(self, request: Request) -> Response:
        """Stream the parts of a view that change. The first message has all that differ."""
        view, job = request.path_params["view"], request.path_params.get("job")
        make: Callable[[State], Awaitable[Parts]] | None = {
            "now": _later(self._views.now), "nodes": _later(self._views.nodes),
            "scheduler": _later(self._views.scheduler), "sweeps": _later(self._views.sweeps),
            "job": self._job_parts(JobId(job)) if job else None,
            "sweep": self._sweep_parts(JobId(job)) if job else None,
        }.get(view)  # fmt: skip
        if make is None:
            return PlainTextResponse("no such view\n", HTTPStatus.NOT_FOUND)
        return self._stream(self._changes((view, job), make))

    def _job_parts(self, job: JobId) -> Callable[[State], Awaitable[Parts]]:
        async def parts(state: State) -> Parts:
            try:
                return self._views.job(state, await self.mirror.job(job))
            except OnesError:
                return self._views.common(state)

        return parts

    def _sweep_parts(self, job: JobId) -> Callable[[State], Awaitable[Parts]]:
        async def parts(state: State) -> Parts:
            try:
                return self._views.sweep(state, await self.mirror.sweep(job))
            except OnesError:
                return self._views.common(state)

        return parts

    async def _changes(
        self, view: object, make: Callable[[State], Awaitable[Parts]]
    ) -> AsyncIterator[bytes]:
        sent, state, said = NOTHING, self.mirror.state, 0.0
        async with self.mirror.watching():
            while True:
                parts = await self._news.parts(view, state, make)
                if "status" in parts and len(parts) == 1 and len(sent) > 1:
                    parts = {**sent, **parts}  # the rest is not known while nobody replies
                if parts is not sent or time.monotonic() >= said + HEARTBEAT_S:
                    yield self._news.message(view, state, sent, parts)
                    sent, said = parts, time.monotonic()
                state = await self.mirror.next(state.version, HEARTBEAT_S)

    def _stream(self, source: AsyncIterator[str | bytes]) -> Response:
        if self._streams >= MAX_STREAMS:
            headers = {"retry-after": "30"}
            return PlainTextResponse("too many open pages\n", 503, headers)

        async def counted() -> AsyncIterator[str | bytes]:
            self._streams += 1
            closing = asyncio.create_task(self._closing.wait())
            waits: set[asyncio.Future[Any]] = {closing}
            try:
                while not closing.done():
                    step = asyncio.ensure_future(anext(source, None))
                    waits = {closing, step}
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    if closing.done() or (message := step.result()) is None:
                        break
                    yield message
            finally:
                self._streams -= 1
                for wait in waits:
                    wait.cancel()

        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(counted(), media_type="text/event-stream", headers=headers)

    async def output(self, request: Request) -> Response:
        """Stream the output of a job with the key of the user, or of this page."""
        job, session = request.path_params["job"], await self._session(request)
        rank = request.query_params.get("rank", "")
        search = request.query_params.get("search", "")[:200]
        own = await asyncio.to_thread(self._is_own_process, request)
        client = session.client if session else await self.mirror.ask(_itself) if own else None
        if client is None:
            said = "Log in to read the output of your jobs."
            return self._stream(_once(f"event: refused\ndata: {said}\n\n"))
        lines = self._lines(client, job, int(rank) if rank.isdecimal() else None, search)
        return self._stream(lines)

    def _is_own_process(self, request: Request) -> bool:
        """True if the peer may read what the key of this page may read.

        That is everybody if it is a viewer's key. Otherwise it is a process of the same user on
        this host, because that user can read the key.
        """
        cluster = self.mirror.state.cluster
        if cluster is not None and cluster.role == "viewer":
            return True
        if self._public or request.client is None:
            return False
        with suppress(psutil.Error, OSError):
            for found in psutil.net_connections("tcp"):
                ours = found.raddr and found.raddr[:] == request.scope["server"][:]
                if ours and found.laddr[:] == request.client[:] and found.pid is not None:
                    return bool(psutil.Process(found.pid).uids().real == os.getuid())
        return False

    async def _lines(
        self, client: Client, job: str, rank: int | None, search: str
    ) -> AsyncIterator[str]:
        search = re.escape(search)  # a pattern of a stranger could take forever
        try:
            pages = client.output_pages(
                job, rank, follow=True, last=LAST_LINES, matching=search, unfinished=True
            )
            async for page in pages:
                lines = [(one.rank, _cut(one.text), one.end) for one in page]
                yield f"data: {json.dumps(lines)}\n\n" if lines else ": no news\n\n"
            yield "event: ended\ndata:\n\n"
        except OnesError as error:
            yield f"event: refused\ndata: {plain(error)}\n\n"

    async def chart(self, request: Request) -> Response:
        """Return a chart, or only its data."""
        name, job, note = request.path_params["chart"], request.path_params.get("job"), ""
        if name == "gantt":
            window = self._window(request)[0]
            past = await self.mirror.events_of(window)
            until = min(past.end, self.mirror.state.now())
            drawn = await asyncio.to_thread(charts.gantt, past.events, window, until)
            if past.end < window.end:
                note = f"Too many events: the chart ends at {second(past.end)}. Zoom in."
            elif past.begin > window.begin:
                note = f"Too many events: the chart begins at {second(past.begin)}."
        elif name == "job" and job:
            found = await self.mirror.job(JobId(job))
            drawn = await asyncio.to_thread(charts.job_chart, found.detail, self.mirror.state.now())
        elif name == "sweep" and job:
            drawn = charts.trials(await self.mirror.sweep(JobId(job)))
        elif name in charts.OF_PLANS:
            drawn = await asyncio.to_thread(charts.plans, self.mirror.latest_events(), name)
        else:
            return PlainTextResponse("no such chart\n", HTTPStatus.NOT_FOUND)
        if request.query_params.get("data"):
            return JSONResponse(charts.columns(drawn) | {"note": note})
        dark = request.query_params.get("dark") == "1"
        return JSONResponse(charts.document(drawn, dark=dark))

    def _window(self, request: Request) -> tuple[Window, str, float]:
        """Return the range of time of a request, the name of its length, and its end or 0.

        A range that ends now begins with the first event, if that is later. `from` and `to` are the
        ends of a chart that was moved.
        """
        shown = request.query_params.get("span", "1 h")
        shown = shown if shown in SPANS else "1 h"
        stated = request.query_params.get("until", "")
        until = float(stated) if stated.isdecimal() and len(stated) < 12 else 0.0  # noqa: PLR2004
        now = self.mirror.state.now()
        end = min(until or now, now)
        moved = [_seconds(request.query_params.get(name, "")) for name in ("from", "to")]
        if moved[0] is not None and moved[1] is not None and moved[0] < moved[1]:
            return Window(moved[0], moved[1]), shown, until
        first = 0.0 if until else self.mirror.begin
        return Window(max(end - SPANS[shown], min(first, end - 1.0)), end), shown, until

    # --- logins and actions

    async def _session(self, request: Request) -> Session | None:
        return await self.sessions.find(request.cookies.get(COOKIE, ""))

    async def begin_login(self, _: Request) -> Response:
        """Return the code and the public key of a new login, for `ones web login`."""
        code, public = self.sessions.begin()
        return JSONResponse({"code": code, "public": public, "seconds": SESSION_S})

    async def login(self, request: Request) -> Response:
        """Log in with a code, or say how."""
        code = request.query_params.get("code", "")
        if not code:
            address = str(request.base_url).rstrip("/") + self._base
            return await self._page(
                request, "login.html", title="Log in", address=address, problem=""
            )
        token = await self.sessions.finish(code)
        reply = RedirectResponse(self._base, HTTPStatus.SEE_OTHER)
        reply.set_cookie(
            COOKIE, token, max_age=int(SESSION_S), path=self._base, httponly=True,
            secure=self._secure, samesite="strict",
        )  # fmt: skip
        return reply

    async def logout(self, request: Request) -> Response:
        """End the session."""
        await self._form(request)
        await self.sessions.end(request.cookies.get(COOKIE, ""))
        reply = RedirectResponse(self._base, HTTPStatus.SEE_OTHER)
        reply.delete_cookie(COOKIE, path=self._base)
        return reply

    async def _form(self, request: Request) -> tuple[Session, Mapping[str, str]]:
        """Return the session and the fields of a form that this page made.

        Raises:
            DeniedError: if nobody is logged in, or the form comes from another page.
        """
        session = await self._session(request)
        if session is None:
            raise DeniedError("nobody is logged in here", "run `ones web login`")
        if int(request.headers.get("content-length", "0") or 0) > MAX_FORM_BYTES:
            raise BadFieldError("the form is too large", "", "content-length")
        fields = {name: str(value) for name, value in (await request.form()).items()}
        origin = request.headers.get("origin")
        ours = {request.headers.get("host"), self._public}
        foreign = origin is not None and urlsplit(origin).netloc not in ours - {""}
        if foreign or fields.get("csrf") != session.csrf:
            raise DeniedError("this form is not from this page, or from an earlier login", "reload")
        return session, fields

    async def act(self, request: Request) -> Response:
        """Pause, resume, resize or cancel a job with the user's own key."""
        job = request.path_params["job"]
        session, fields = await self._form(request)
        client, action = session.client, fields.get("action", "")
        if action == "pause":
            await client.pause(job)
        elif action == "resume":
            await client.resume(job)
        elif action == "auto":
            await client.resume(job, auto=True)
        elif action == "cancel":
            await client.cancel(job)
        elif action == "resize":
            slots = fields.get("slots", "")
            if not slots.isdecimal():
                raise BadFieldError(f"slots: {slots!r} is not a number", "write 1 or more", "slots")
            await client.resize(job, slots=int(slots))
        else:
            raise BadFieldError(f"action: {action!r} is unknown", "reload the page", "action")
        return RedirectResponse(f"{self._base}jobs/{quote(job)}", HTTPStatus.SEE_OTHER)


def results_in(data: bytes, file: str) -> dict[str, list[float]]:
    """Return the completion times (s) of each policy in a file of results.

    Raises:
        BadFieldError: if it is no such file.
    """
    hint = "choose a file that `ones sim run -o json` wrote"
    try:
        found = msgspec.json.decode(data)
        many = found.get("results", [found]) if isinstance(found, dict) else found
        results = msgspec.convert(many, list[_Result])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadFieldError(f"results: {file} has no results: {error}", hint, "results") from None
    times: dict[str, list[float]] = {}
    for result in results:
        times.setdefault(f"{file}: {result.policy}", []).extend(result.jct_s.values())
    return {name: values for name, values in times.items() if values}


def _seconds(text: str) -> float | None:
    """Return a time in a query, or None if it is none."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if 0.0 <= found <= LAST else None


def _later(view: Callable[[State], Parts]) -> Callable[[State], Awaitable[Parts]]:
    async def parts(state: State) -> Parts:
        return view(state)

    return parts


async def _once(message: str) -> AsyncIterator[str]:
    yield message


async def _itself(client: Client) -> Client:
    return client


def _cut(text: str) -> str:
    shown = "".join(char if char.isprintable() or char == "\t" else "\N{REPLACEMENT CHARACTER}"
                    for char in text[:LONGEST_LINE])  # fmt: skip
    return shown if len(text) <= LONGEST_LINE else f"{shown}… ({len(text)} characters)"
