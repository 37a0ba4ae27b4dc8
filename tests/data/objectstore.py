"""An object store as a real server process (moto), behind a proxy that breaks answers as requested."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from freeports import free_port

FAULTS = ("503", "cut", "short")
"""A busy server; a connection that is cut within the body; a body that ends early, with a length that fits it."""
BUCKET = "images"


class Store:
    """The store as tests see it: what was asked for, and the faults to come."""

    def __init__(self, port: int, backend: int):
        self.port, self.backend = port, backend
        self.url = f"http://127.0.0.1:{port}"
        self.gets: list[tuple[str, int, int]] = []
        """(name of the object, first byte, last byte or -1) of each GET of an object, answered or not."""
        self.faults: list[str] = []
        """Faults of the next GETs of shards, taken from the front."""
        self.lock = threading.Lock()

    def put(self, folder: Path, prefix: str) -> str:
        """Upload the files of a folder; return their address."""
        import boto3

        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.backend}", region_name="us-east-1")
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists):
            client.create_bucket(Bucket=BUCKET)
        for path in sorted(folder.iterdir()):
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path.name}", Body=path.read_bytes())
        return f"s3://{BUCKET}/{prefix}/"

    def shards(self) -> list[str]:
        """Names of the shards that were asked for, in order, each as often as it was."""
        return [name for name, _, _ in self.gets if name.endswith(".tar")]

    def forget(self) -> None:
        """Forget the GETs so far."""
        self.gets.clear()


def _handler(store: Store) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _forward(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            backend = http.client.HTTPConnection("127.0.0.1", store.backend, timeout=30)
            try:
                backend.request(self.command, self.path, self.rfile.read(size), dict(self.headers))
                answer = backend.getresponse()
                body = answer.read()
            finally:
                backend.close()
            fault = self._fault()
            if fault == "503":
                self._answer(503, [], b"busy", 4)
                return
            length = len(body) if self.command != "HEAD" else int(answer.headers.get("Content-Length") or 0)
            sent = body[: len(body) // 2] if fault else body
            self._answer(answer.status, answer.getheaders(), sent, len(sent) if fault == "short" else length)
            if fault == "cut":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def _fault(self) -> str:
            name = self.path.partition("?")[0].rpartition("/")[2]
            if self.command != "GET" or "list-type" in self.path or not name:
                return ""
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            with store.lock:
                store.gets.append((name, int(first), int(last or -1)))
                return store.faults.pop(0) if name.endswith(".tar") and store.faults else ""

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "transfer-encoding", "server", "date"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = _forward  # noqa: N815

    return Handler


@contextlib.contextmanager
def running() -> Iterator[Store]:
    """Run the server and its proxy."""
    backend = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(backend)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _await(backend)
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        proxy.daemon_threads = True
        store = Store(proxy.server_address[1], backend)
        proxy.RequestHandlerClass = _handler(store)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield store
        proxy.shutdown()
        proxy.server_close()
    finally:
        process.terminate()
        process.wait()


def _await(port: int) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError("the store did not start")
