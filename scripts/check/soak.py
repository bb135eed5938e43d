#!/usr/bin/env python3
"""Load llama-server with an hour's worth of requests in a few minutes: memory stays flat, every answer is well-formed.

    scripts/check/soak.py --requests 3600 --json docs/results/soak.json

64 clients send good and bad requests at once: completions, chats and streams, some of which hang up in the middle,
prompts longer than the context, JSON that is none, values out of range. An hour's worth is one request a second. After
them come short runs with other settings that show where memory goes: the server keeps the states of finished prompts
in a cache of its own (--cache-ram, 8 GiB by default), and glibc gives each of its 64 threads for HTTP an arena of
memory that keeps what was freed. In the long run the cache is off and there is one arena (MALLOC_ARENA_MAX), and before
it all clients send each kind of request at once, so that what still grows is lost. Exit code 1 when an answer was not
what it should be, the server ended, or memory grew by more than 5% after the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gguf_itq3s.base.errors import UserError, positive, report_errors
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

ROOT: Final = Path(__file__).resolve().parents[2]
SERVER: Final = ROOT / "build" / "bin" / "llama-server"
MODEL: Final = ROOT / "models" / "demo-llama"
TEXT: Final = ROOT / "tests" / "data" / "novel.txt"
SLOTS: Final = 8
#: Tokens of context of a slot.
CONTEXT: Final = 512
#: Requests of each kind that a client sends to warm up, and what memory may grow by after.
WARM_UP: Final = 2
GROWTH: Final = 0.05
#: Seconds that an answer may take on a loaded machine.
SECONDS: Final = 120.0


@dataclass
class Tally:
    """What the clients saw.

    Attributes:
        requests: kind -> how many.
        wrong: a line for each answer that was not what it should be.
        memory: (requests done, bytes of anonymous memory) over the time.
    """

    requests: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Client:
    """One client: a connection for each request, and a generator of chances of its own."""

    def __init__(self, port: int, number: int, text: str, tally: Tally) -> None:
        self._port, self._text, self._tally = port, text, tally
        self._chance = random.Random(number)
        self._kinds: list[Callable[[], None]] = [
            *([self.completion] * 6), *([self.chat] * 3), *([self.stream] * 3), *([self.hang_up] * 3),
            *([self.repeat] * 2), self.long_prompt, self.too_long, self.bad_json, self.bad_values, self.bad_path,
            self.tokens,
        ]  # fmt: skip

    def kinds(self) -> list[Callable[[], None]]:
        """Each kind of request once."""
        return list(dict.fromkeys(self._kinds))

    def request(self, kind: Callable[[], None] | None = None) -> None:
        """Send one request, of some kind by chance, and look at the answer."""
        kind = kind or self._chance.choice(self._kinds)
        try:
            kind()
            wrong = None
        except (AssertionError, ValueError, KeyError, TypeError, OSError, http.client.HTTPException) as error:
            wrong = f"{kind.__name__}: {type(error).__name__}: {error}"[:300]
        with self._tally.lock:
            self._tally.requests[kind.__name__] += 1
            if wrong:
                self._tally.wrong.append(wrong)

    def _prompt(self, words: int) -> str:
        start = self._chance.randrange(len(self._text) - 10 * words)
        return " ".join(self._text[start : start + 10 * words].split()[:words])

    @contextlib.contextmanager
    def _send(self, path: str, body: bytes | dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request("POST" if body is not None else "GET", path, data, {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def _post(self, path: str, body: bytes | dict[str, Any], *statuses: int) -> Any:
        with self._send(path, body) as response:
            answer = json.loads(response.read())
            assert response.status in (statuses or (200,)), f"{response.status} {answer}"
        if response.status != 200:
            assert isinstance(answer["error"]["message"], str) and answer["error"]["code"] == response.status, answer
        return answer

    def _complete(self, prompt: str, count: int) -> None:
        answer = self._post("/completion", {"prompt": prompt, "n_predict": count, "seed": self._chance.randrange(99)})
        assert isinstance(answer["content"], str) and answer["tokens_predicted"] <= count, answer

    def completion(self) -> None:
        """A short completion of some text."""
        self._complete(self._prompt(self._chance.randrange(1, 60)), self._chance.randrange(1, 24))

    def repeat(self) -> None:
        """The same prompt as of other clients: the server may take it from a slot."""
        self._complete("Once upon a time, in a land far away, there lived", 8)

    def long_prompt(self) -> None:
        """Most of the context."""
        self._complete(self._prompt(150), 16)

    def chat(self) -> None:
        """A chat in OpenAI's form."""
        body = {"messages": [{"role": "user", "content": self._prompt(20)}], "max_tokens": 12}
        answer = self._post("/v1/chat/completions", body)
        assert isinstance(answer["choices"][0]["message"]["content"], str), answer

    def stream(self) -> None:
        """A stream that is read to its end."""
        with self._send("/completion", {"prompt": self._prompt(20), "n_predict": 12, "stream": True}) as response:
            lines = [line for line in response.read().decode().splitlines() if line]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert response.status == 200 and events and events[-1]["stop"] is True, lines[-1:]

    def hang_up(self) -> None:
        """A stream whose reader goes away: at once, or after a few bytes."""
        with self._send("/completion", {"prompt": self._prompt(40), "n_predict": 200, "stream": True}) as response:
            response.read(self._chance.choice((0, 1, 100)))

    def too_long(self) -> None:
        """A prompt that no slot has room for."""
        self._post("/completion", {"prompt": self._prompt(3000), "n_predict": 4}, 400)

    def bad_json(self) -> None:
        """Bodies that are no JSON."""
        bodies = (
            b"",
            b"{",
            b'{"prompt": ',
            b"[1, 2",
            b"\xff\xfe\x00",
            b'{"prompt": "a"' + b"[" * 2000,
            b"nul",
            b'{"a" 1}',
        )
        self._post("/completion", self._chance.choice(bodies), 400, 500)

    def bad_values(self) -> None:
        """JSON that asks for what cannot be."""
        bodies: tuple[dict[str, Any], ...] = (
            {"prompt": {"a": 1}}, {"prompt": [["a"], {}]}, {"prompt": "a", "n_predict": "many"}, {"n_predict": 3},
            {"prompt": "a", "grammar": "root ::= ("}, {"prompt": [99999999], "n_predict": 2},
            {"prompt": "a", "logit_bias": [["a", "b", "c"]], "n_predict": 2, "temperature": "hot"},
        )  # fmt: skip
        self._post("/completion", self._chance.choice(bodies), 400, 500)

    def bad_path(self) -> None:
        """A path that there is not."""
        self._post("/v1/nothing", {"a": 1}, 404)

    def tokens(self) -> None:
        """Text to tokens and back."""
        text = self._prompt(30)
        found = self._post("/tokenize", {"content": text})["tokens"]
        assert text in self._post("/detokenize", {"tokens": found})["content"]


@contextlib.contextmanager
def server(model: Path, options: Sequence[str], arenas: int | None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server that has loaded the model, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(SERVER), "-m", str(model), "--port", str(port), "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT)]
    quiet = ["-t", "2", "--no-warmup", "--log-disable", "-fit", "off"]
    environment = {**os.environ, **({} if arenas is None else {"MALLOC_ARENA_MAX": str(arenas)})}
    process = subprocess.Popen(
        [*command, *quiet, *options], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise UserError(SERVER, f"does not start (exit code {process.poll()})", "run make build")
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            time.sleep(0.1)
        yield process, port
    finally:
        process.terminate()
        process.wait(timeout=SECONDS)


def anonymous_memory(pid: int) -> int:
    """Bytes of a process's memory that no file stands behind."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


def load(
    model: Path, requests: int, clients: int, options: Sequence[str], arenas: int | None = 1, warm_up: int = WARM_UP
) -> tuple[Tally, dict[str, Any]]:
    """Load a server; the tally, and what came of the memory.

    Args:
        model: GGUF file.
        requests: after the warm-up.
        clients: at a time.
        options: of the server.
        arenas: of glibc, None for its default.
        warm_up: requests of each kind that every client sends before.
    """
    tally, text = Tally(), TEXT.read_text()
    started = time.monotonic()
    with server(model, options, arenas) as (process, port):
        before = anonymous_memory(process.pid)
        own = [Client(port, number, text, tally) for number in range(clients)]
        for kind in range(len(own[0].kinds())):
            for _ in range(warm_up):
                _together(own, lambda client: client.request(client.kinds()[kind]))  # noqa: B023
        time.sleep(1)
        left = threading.Semaphore(requests)
        first = anonymous_memory(process.pid)

        def watch() -> None:
            while process.poll() is None:
                with contextlib.suppress(OSError, StopIteration):
                    tally.memory.append((tally.requests.total(), anonymous_memory(process.pid)))
                time.sleep(0.25)

        def work(client: Client) -> None:
            while left.acquire(blocking=False) and process.poll() is None:
                client.request()

        threading.Thread(target=watch, daemon=True).start()
        _together(own, work)
        time.sleep(1)  # slots of those who hung up end
        if process.poll() is not None:
            tally.wrong.append(f"the server ended with code {process.returncode}")
    seconds = time.monotonic() - started
    used = [memory for _, memory in tally.memory]
    last = statistics.median(used[-max(1, len(used) // 4) :])
    megabytes = {"MB_before": before, "MB_after_warm_up": first, "MB_at_end": last, "MB_peak": max(used)}
    return tally, {
        "options": list(options), "arenas": arenas, "clients": clients,
        "requests": dict(sorted(tally.requests.items())), "total": tally.requests.total(),
        "seconds": round(seconds, 1), "wrong": len(tally.wrong),
        **{name: round(value / 1e6, 1) for name, value in megabytes.items()}, "growth": round(last / first - 1, 4),
    }  # fmt: skip


def _together(clients: Sequence[Client], work: Callable[[Client], None]) -> None:
    """Let all clients work at once, each in a thread, and wait for them."""
    threads = [threading.Thread(target=work, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


#: Settings of the short runs, which show what takes memory: options of the server, arenas of the allocator.
SETTINGS: Final[dict[str, tuple[tuple[str, ...], int | None]]] = {
    "no prompt cache, one arena": (("--cache-ram", "0"), 1),
    "no prompt cache, arenas by default": (("--cache-ram", "0"), None),
    "prompt cache of 16 MiB, one arena": (("--cache-ram", "16"), 1),
    "prompt cache of 8 GiB (default), one arena": ((), 1),
    "defaults": ((), None),
}


@report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=3600, help="of the long run (default: %(default)s)")
    parser.add_argument("--clients", type=positive, default=64, help="default: %(default)s")
    parser.add_argument("--short", type=positive, default=600, help="requests of the short runs (default: %(default)s)")
    parser.add_argument("--no-settings", action="store_true", help="leave the short runs out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    args = parser.parse_args(argv)
    if not SERVER.exists():
        raise UserError(SERVER, "is not there", "run make build")
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "demo.gguf"
        convert(ConvertOptions.of(MODEL, model), open("/dev/null", "w"))  # noqa: SIM115
        tally, soak = load(model, args.requests, args.clients, ("--cache-ram", "0"))
        print(describe("soak", soak))
        results: dict[str, Any] = {"soak": soak, "settings": {}}
        for name, (options, arenas) in {} if args.no_settings else SETTINGS.items():
            more, facts = load(model, args.short, args.clients, options, arenas, warm_up=0)
            tally.wrong += more.wrong
            results["settings"][name] = facts
            print(describe(name, facts))
    for line in tally.wrong[:20]:
        print(f"wrong: {line}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if soak["growth"] > GROWTH:
        print(f"memory grew by {100 * soak['growth']:.1f}%, more than {100 * GROWTH:.0f}%")
    return int(bool(tally.wrong) or soak["growth"] > GROWTH)


def describe(name: str, facts: dict[str, Any]) -> str:
    """One line of a run."""
    memory = " -> ".join(f"{facts[key]:.1f}" for key in ("MB_before", "MB_after_warm_up", "MB_at_end"))
    return f"{name}: {facts['total']} requests in {facts['seconds']} s, {facts['wrong']} wrong, {memory} MB"


if __name__ == "__main__":
    sys.exit(main())
