"""Submits a job and follows it with nothing but pyzmq and msgpack.

    ONES_HOME=DIR python examples/plain_msgpack_client.py examples/digits/job.toml

A cluster's folder says all that is needed: `client.toml` has the endpoint and names the key files,
which are pyzmq certificates. A request is two frames on a DEALER, an id of our choice and a
MessagePack map whose key `type` says what it is; the reply repeats the id.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.auth

ANSWER_MS = 30_000
PIECE = 1 << 20
ENDED = {"succeeded", "failed", "cancelled", "rejected"}


class Caller:
    """A DEALER with CURVE: one request, one reply."""

    def __init__(self, context: zmq.Context, home: Path, endpoint: str) -> None:
        server, _ = zmq.auth.load_certificate(home / "keys" / "server.key")
        public, secret = zmq.auth.load_certificate(home / "keys" / "admin.key_secret")
        self.socket = context.socket(zmq.DEALER)
        self.socket.curve_serverkey = server
        self.socket.curve_publickey = public
        self.socket.curve_secretkey = secret
        self.socket.linger = 0
        self.socket.connect(endpoint)
        self.ids = itertools.count(1)

    def call(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its reply; an error ends the program."""
        request_id = str(next(self.ids)).encode()
        self.socket.send_multipart([request_id, msgpack.packb({"type": kind, **fields})])
        while self.socket.poll(ANSWER_MS):
            reply_id, body = self.socket.recv_multipart()
            reply = msgpack.unpackb(body)
            if reply_id != request_id:
                continue
            if reply["type"] == "client.failed.1":
                sys.exit(f"{reply['code']}: {reply['message']}; {reply['hint']}")
            return reply
        sys.exit("no controller answers; is the cluster up?")


def archive_of(folder: Path) -> bytes:
    """A gzipped tar of the files in `folder`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                tar.add(path, arcname=path.relative_to(folder))
    return packed.getvalue()


def store(client: Caller, archive: bytes) -> str:
    """Send what the cluster does not have of `archive`; its digest names it."""
    digest = hashlib.sha256(archive).hexdigest()
    stored = -1
    while stored < len(archive):
        offset = max(stored, 0)
        piece = archive[offset : offset + PIECE]
        reply = client.call(
            "client.put_snapshot.1", digest=digest, offset=offset, data=piece, total=len(archive)
        )
        stored = reply["size"]
    return digest


def follow(client: Caller, job: str) -> None:
    """Print the output of `job` until it has ended."""
    cursor = 0
    while True:
        page = client.call("logs.read.1", job=job, cursor=cursor, wait_s=10.0)
        for piece in page["pieces"]:
            sys.stdout.write(piece["data"].decode("utf-8", "replace"))
        sys.stdout.flush()
        cursor = page["cursor"]
        if page["ended"]:
            return


def main() -> int:
    """Submit the job file of the command line; the exit code says how the job ended."""
    if len(sys.argv) != 2:
        sys.exit("usage: ONES_HOME=DIR plain_msgpack_client.py JOB.toml")
    home = Path(os.environ["ONES_HOME"])
    job_file = Path(sys.argv[1])
    endpoint = tomllib.loads((home / "client.toml").read_text())["endpoint"]
    context = zmq.Context()
    client = Caller(context, home, endpoint)
    cluster = client.call("client.get_cluster.1")
    print(f"release {cluster['release']}, policy {cluster['policy']}, I am {cluster['user']}")

    spec = tomllib.loads(job_file.read_text())
    workdir = (job_file.parent / spec.get("workdir", ".")).resolve()
    digest = store(client, archive_of(workdir))
    spec["workdir"] = str(workdir)
    key = f"plain-{os.getpid()}"  # a repeated request with the same key is the same job
    job = client.call("client.submit_job.1", spec=spec, snapshot=digest, key=key)["job"]
    print(f"submitted {job}")

    host = endpoint.rpartition(":")[0]
    follow(Caller(context, home, f"{host}:{cluster['log_port']}"), job)
    summary = client.call("client.get_job.1", job=job, wait_s=10.0)["summary"]
    print(f"{job} {summary['state']}: {summary['reason']}")
    context.destroy(linger=0)
    return 0 if summary["state"] == "succeeded" else 1


if __name__ == "__main__":
    sys.exit(main())
