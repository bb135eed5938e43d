"""A llama-server for a test, on a port of its own."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama

#: No proxy of the environment stands between a test and its own machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Server:
    """One that answers."""

    url: str

    def get(self, path: str) -> Any:
        return self._answer(urllib.request.Request(self.url + path))

    def post(self, path: str, body: object) -> Any:
        """POST JSON; returns the JSON of the answer."""
        data = json.dumps(body).encode()
        return self._answer(urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}))

    @staticmethod
    def _answer(request: urllib.request.Request) -> Any:
        with DIRECT.open(request, timeout=600) as response:
            return json.load(response)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(*arguments: str | Path) -> Iterator[Server]:
    """``llama-server`` with these arguments, on two threads, until the block ends."""
    port = free_port()
    command = [llama.BIN / "llama-server", *arguments, "--port", str(port), "-t", "2"]
    with started([str(part) for part in command], port) as server:
        yield server


@contextlib.contextmanager
def started(
    command: Sequence[str], port: int, folder: Path | None = None, *, health: str = "/health"
) -> Iterator[Server]:
    """A command that listens on a port, run in a folder, once it says that it is healthy."""
    log = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe that nobody reads would stop the server
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder)
    server = Server(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                if server.get(health).get("status") == "ok":
                    break
            time.sleep(0.05)
        else:
            log.seek(0)
            raise AssertionError(f"{command} did not start: {log.read().decode(errors='replace')[-2000:]}")
        yield server
    finally:
        process.kill()
        process.wait()
        log.close()
