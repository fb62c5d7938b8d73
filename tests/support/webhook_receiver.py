"""HTTP server that receives webhooks."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

LIMIT_S: Final = 60.0


class Receiver:
    """An HTTP server that keeps what it accepts, and refuses the first `refuses` requests."""

    def __init__(self, refuses: int = 0, status: int = 500) -> None:
        self.accepted: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.refused = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if receiver.refused < refuses:
                    receiver.refused += 1
                    self.send_response(status)
                    self.send_header("location", "/elsewhere")
                else:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    receiver.accepted.append(({**headers, "body": body.decode()}, json.loads(body)))
                    self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def jobs(self) -> list[tuple[str, str]]:
        """Type and job of each accepted event."""
        return [(body["type"], body["data"]["job"]) for _, body in self.accepted]

    async def until(self, count: int) -> None:
        """Wait until so many events are accepted."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.accepted) < count:
                await asyncio.sleep(0.005)
