"""A model spread over two RPC servers on the loopback interface writes what it writes on one machine."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import llama
from gguf_itq3s.cli import convert_main

PROMPT = "When the captain came back on deck, the sea was"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(log: Path) -> Iterator[str]:
    """A server of this machine's CPU; its address."""
    address = ("127.0.0.1", free_port())
    command = [str(llama.BIN / "ggml-rpc-server"), "--host", address[0], "--port", str(address[1]), "--threads", "1"]
    with (
        log.open("w") as output,
        subprocess.Popen([*command, "--device", "CPU"], stdout=output, stderr=output) as child,
    ):
        try:
            for _ in range(6000):
                assert child.poll() is None, log.read_text()
                with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
                    break
                time.sleep(0.05)
            else:
                raise AssertionError(f"no answer: {log.read_text()}")
            yield f"{address[0]}:{address[1]}"
        finally:
            child.terminate()


def text(model: Path, *options: str) -> tuple[str, str]:
    """Greedy continuation of the prompt by the tools with RPC, and what they log."""
    greedy = ("-p", PROMPT, "-n", "48", "-no-cnv", "--temp", "0", "-t", "1")
    done = llama.run("llama-completion", "-m", model, *greedy, *options)
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("outtype", ["itq3_s", "tq2_0"])
def test_two_servers_write_the_local_text(tmp_path: Path, outtype: str) -> None:
    model = tmp_path / "model.gguf"
    # Upstream's types are repacked on one machine and not by a server, which rounds in another order.
    assert not convert_main([str(llama.MODEL), str(model), "--outtype", outtype, "--pure"])
    local, _ = text(model, "-ngl", "0")
    assert local.startswith(PROMPT) and len(local) > len(PROMPT) + 48
    with server(tmp_path / "one.txt") as one, server(tmp_path / "two.txt") as two:
        spread, log = text(model, "--rpc", f"{one},{two}", "-ngl", "99", "-ts", "1,1", "-v")
    assert spread == local
    # Each has its share of the weights and computes with it.
    shares = {m[1]: float(m[2]) for m in re.finditer(r"RPC\d\[(\S+)\] model buffer size = +([0-9.]+) MiB", log)}
    assert set(shares) == {one, two} and min(shares.values()) > 0.2 * max(shares.values()), log[-4000:]
