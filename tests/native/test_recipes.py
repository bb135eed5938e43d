"""Every recipe of docs/recipes.md, run as the page has it."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import yaml

import binding
import llama
import llama_server
from gguf_itq3s import upstream
from gguf_itq3s.convert.options import ConvertOptions
from gguf_itq3s.convert.pipeline import convert

PAGE = llama.ROOT / "docs" / "recipes.md"
PROMPT = "The old house stood at the end of the lane, and"


def sections() -> dict[str, list[tuple[str, str]]]:
    """Title -> its blocks of code, (language, code) each."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    blocks = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {title: blocks.findall(text) for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def block(title: str, language: str, number: int = 0) -> str:
    return [code for kind, code in sections()[title] if kind == language][number].strip()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the page supposes it: the build, and a model."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "build").symlink_to(llama.BIN.parent)
    # Ours alone: products of upstream's types are not the same to the last bit in every build.
    convert(ConvertOptions.of(llama.MODEL, folder / "model.gguf", pure=True), io.StringIO())
    return folder


@pytest.fixture(scope="module")
def expected(place: Path) -> str:
    """What the model writes, by llama.cpp's own tool."""
    arguments = ["-p", PROMPT, "-n", "16", "--temp", "0", "-no-cnv", "-t", "2"]
    text = llama.run("llama-completion", "-m", place / "model.gguf", *arguments).stdout
    answer = text.partition(PROMPT)[2].strip()
    assert len(answer.split()) > 6
    return answer


def run(command: str, place: Path, **environment: str) -> str:
    """A line for the shell, with the tests' Python first on the path, no network and no proxy."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", **environment}
    done = subprocess.run(command, shell=True, cwd=place, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_file_for_every_llama_cpp(place: Path) -> None:
    command = block("Ollama, LM Studio and every other llama.cpp", "sh")
    command = command.removeprefix(".venv/bin/").replace("MODEL_DIR", shlex.quote(str(llama.MODEL)))
    run(f"{command} --tokens 2048", place)
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(place / "model-q4_k_m.gguf").tensors}
    assert types == {"F32", "Q4_K", "Q6_K"}


def test_every_block_of_the_page_is_run() -> None:
    """A new section needs a test of its own here."""
    assert {title: [kind for kind, _ in found] for title, found in sections().items()} == {
        "Ollama, LM Studio and every other llama.cpp": ["sh"],
        "llama-cpp-python": ["sh", "python", "sh"],
        "Transformers": ["python"],
        "llama-server and the OpenAI client": ["sh", "python"],
        "llama-swap": ["yaml"],
        "Open WebUI and other clients by URL": ["sh"],
    }


def test_llama_cpp_python(place: Path, expected: str) -> None:
    install, command = (block("llama-cpp-python", "sh", number) for number in range(2))
    assert install == f"CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install {upstream.PACKAGE}=={upstream.VERSION}"
    (place / "recipe.py").write_text(block("llama-cpp-python", "python"))
    said = run(command, place, PYTHONPATH=str(binding.folder()))
    assert said.strip() == expected


def test_transformers(place: Path, expected: str) -> None:
    (place / "recipe.py").write_text(block("Transformers", "python"))
    said = run("python recipe.py", place)
    # The kernels of llama.cpp round activations to 8 bits, so texts may part in time.
    assert PROMPT in said and said.partition(PROMPT)[2].split()[:6] == expected.split()[:6]
    (place / "recipe.py").write_text(block("Transformers", "python").replace("import gguf_itq3s", "pass"))
    with pytest.raises(AssertionError, match="510"):
        run("python recipe.py", place)


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[llama_server.Server]:
    """The page's server, on another port."""
    port = llama_server.free_port()
    command = block("llama-server and the OpenAI client", "sh").replace("8080", str(port))
    assert str(port) in command
    with llama_server.started(shlex.split(command), port, place) as server:
        yield server


def test_openai_client(place: Path, served: llama_server.Server) -> None:
    code = block("llama-server and the OpenAI client", "python")
    (place / "recipe.py").write_text(code.replace("http://127.0.0.1:8080", served.url))
    models, answer = run("python recipe.py", place).split("\n", 1)
    assert models == "['itq3_s']"
    assert len(answer.split()) > 8


def test_llama_swap(place: Path) -> None:
    models = yaml.safe_load(block("llama-swap", "yaml"))["models"]
    ((name, entry),) = models.items()
    port = llama_server.free_port()
    command = shlex.split(entry["cmd"].replace("${PORT}", str(port)))
    with llama_server.started(command, port, place, health=entry["checkEndpoint"]) as server:
        body = {"model": name, "messages": [{"role": "user", "content": "Begin."}], "max_tokens": 8}
        assert server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"].strip()


def test_clients_by_url(served: llama_server.Server) -> None:
    line = block("Open WebUI and other clients by URL", "sh")
    settings = dict(re.findall(r"(\w+)=(\S+)", line))
    url = settings["OPENAI_API_BASE_URL"].replace("http://127.0.0.1:8080", "")
    assert url == "/v1"
    (model,) = served.get(f"{url}/models")["data"]
    body = {"model": model["id"], "messages": [{"role": "user", "content": "Begin."}], "max_tokens": 8, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {settings['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{served.url}{url}/chat/completions", json.dumps(body).encode(), headers)
    with llama_server.DIRECT.open(request, timeout=600) as response:
        lines = [line.decode().strip() for line in response if line.startswith(b"data: ")]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1]]
    assert "".join(part[0]["delta"].get("content") or "" for part in parts if part).strip()
