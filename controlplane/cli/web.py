"""`ones web`: the web page of a cluster, and logins to it."""

from __future__ import annotations

import ipaddress
import json
import resource
import signal
import socket
import time
import urllib.request
from contextlib import suppress
from typing import Annotated, Any, Final
from urllib.parse import quote, urlsplit

from cyclopts import App, Parameter
from setproctitle import setproctitle

from controlplane.cli.local import PAGE_PID_FILE
from controlplane.cli.output import COMMON, Common, say
from controlplane.client import BlockingClient, find_home
from controlplane.client.connection import CONTROLLER_FILE, Home
from schemas.errors import BadFieldError, OnesError, SettingsError, UnreachableError
from schemas.host.files import take_pid_file

PORT: Final = 7780
ADDRESS_FILE: Final = "web.json"  # in the folder of the cluster: address of the latest `ones web`
URL_HELP: Final = "address of the page for people, if a reverse proxy serves it"
REPLY_S: Final = 10.0
UNREAD_MS: Final = 300_000  # time after which a connection ends whose data nobody takes
DESCRIPTORS: Final = 1 << 16  # of open pages, if the host allows so many
MAX_REPLY_BYTES: Final = 4096

web = App(name="web", help="Show the cluster in a browser; log in to its page.")


@web.default
def serve(
    *,
    host: Annotated[str, Parameter(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int | None, Parameter(help=f"default: {PORT}, or a free one")] = None,
    public_url: Annotated[str | None, Parameter(help=URL_HELP)] = None,
    common: Common = COMMON,
) -> None:
    """Serve the web page of the cluster until Ctrl-C.

    The page only shows the cluster. `ones web login` allows a user more in the browser.
    """
    import uvicorn  # noqa: PLC0415 - slow to import, as all of the page

    from controlplane.web.app import WebPage  # noqa: PLC0415

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # else a browser that leaves ends the process
    home = find_home(common.home)
    _check_key(home, host)
    if (home.folder / CONTROLLER_FILE).is_file():  # `ones local down` ends this process
        take_pid_file(home.folder / "run" / PAGE_PID_FILE)
    setproctitle(f"ones: web {home.folder.resolve()}")
    _allow_many_connections()
    listening = _listening(host, port)
    at = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    url = public_url or f"http://{shown}:{at}/"
    address = _parts_of(url)
    page = WebPage(
        home, prefix=address.path or "/", secure=address.scheme == "https",
        public=address.netloc if public_url else "",
    )  # fmt: skip
    named = {address.hostname or "", host, "localhost"}
    names = frozenset() if host in {"0.0.0.0", "::"} and public_url is None else frozenset(named)  # noqa: S104
    with suppress(OSError):
        (home.folder / ADDRESS_FILE).write_text(json.dumps({"url": url}), encoding="utf-8")
    say(
        common,
        {"url": url},
        f"the page is at {url}",
        "`ones web login` prints a link to log in",
        quiet=[url],
    )
    settings = uvicorn.Config(
        page.app(names), log_level="warning", server_header=False, timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=1 << 15, forwarded_allow_ips="127.0.0.1",
    )  # fmt: skip

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            page.close()
            await super().shutdown(sockets)

    Server(settings).run(sockets=[listening])


def _check_key(home: Home, host: str) -> None:
    """Refuse to show more than a viewer's key can see to other hosts."""
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host == "localhost":
        return
    with BlockingClient(home) as client:
        role = client.cluster().role
    if role != "viewer":
        what = f"the key of {home.folder} is of role {role}: others could see what you may see"
        raise SettingsError(what, "use a folder with a viewer's key, or leave --host out", "host")


def _allow_many_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _listening(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for wanted in (PORT, 0) if port is None else (port,):
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a browser that stopped, or whose host sleeps
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        try:
            made.bind((host, wanted))
            made.listen(1024)
        except (OSError, OverflowError) as error:
            made.close()
            failed = error
        else:
            return made
    what = f"cannot listen on {host}:{port}: {failed}"
    raise SettingsError(what, "choose another --port or --host", "port")


def _parts_of(url: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query:
        hint = "write it as https://gpus.example.org/ones"
        raise BadFieldError(f"public-url: {url!r} is not an address of a page", hint, "public_url")
    return parts


@web.command
def login(url: str | None = None, /, *, common: Common = COMMON) -> None:
    """Print a link that logs your browser in to the page at URL, once.

    The page gets a key of its own with your rights, for 12 hours. Without URL, it is the page that
    `ones web` served last from this folder. Only log in to a page that you trust.
    """
    home = find_home(common.home)
    base = (url or _last_url(home)).rstrip("/")
    _parts_of(base)
    begun = _begun(f"{base}/login/begin")
    with BlockingClient(home) as client:
        me = client.cluster()
        ends = time.time() + min(float(begun["seconds"]), 86_000.0)
        client.add_key(begun["public"], me.user, me.role, me.projects, ends)
    link = f"{base}/login?code={quote(begun['code'])}"
    say(common, {"url": link, "user": me.user}, f"open {link}", quiet=[link])


def _last_url(home: Home) -> str:
    try:
        return str(json.loads((home.folder / ADDRESS_FILE).read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        hint = "give its address, or start it with `ones web`"
        raise BadFieldError("url: no page was served from this folder", hint, "url") from None


def _begun(url: str) -> dict[str, Any]:
    request = urllib.request.Request(url, method="POST", data=b"")  # noqa: S310 - checked by _parts_of
    try:
        with urllib.request.urlopen(request, timeout=REPLY_S) as reply:  # noqa: S310
            begun = json.loads(reply.read(MAX_REPLY_BYTES))
        return {
            "code": str(begun["code"]),
            "public": str(begun["public"]),
            "seconds": float(begun["seconds"]),
        }
    except OSError as error:
        raise UnreachableError(
            f"no page replies at {url}: {error}", "start it with `ones web`"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise OnesError(f"{url} is not a page of this release", "check the address") from None
