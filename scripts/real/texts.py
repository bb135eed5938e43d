"""The texts that a real model is scored on and learns from, and a chat that it leads with itself.

=========  =====================================  =================================================================
text       where it is looked for                 else
=========  =====================================  =================================================================
wiki       ``WIKITEXT2``                          downloaded, as by ``gguf-itq3s eval``
code       ``--code-text``, ``REAL_CODE``         files of Python's own library
chat       made: the questions beside this file, answered greedily by the F16 file, in the model's own template
training   ``--training-text``, ``REAL_TRAINING``  the text that comes with the package
=========  =====================================  =================================================================
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from gguf_itq3s.base.errors import UserError
from gguf_itq3s.calibrate.options import BUNDLED
from gguf_itq3s.calibrate.text import read_text
from gguf_itq3s.checkpoint.patches import patched
from gguf_itq3s.evaluate import wikitext
from gguf_itq3s.evaluate.runner import write_json

# After the package, which sees to it that gguf-py is the one of the llama.cpp source.
# isort: split
import gguf
import numpy as np

CODE: Final = "REAL_CODE"
TRAINING: Final = "REAL_TRAINING"
QUESTIONS: Final = Path(__file__).with_name("questions.txt")
#: Of Python's library, for who has no code of the kind that the model is for.
_MODULES: Final = ("tarfile", "argparse", "heapq", "difflib")
_CODE_CHARACTERS: Final = 90_000
#: Tokens of an answer, and seconds that it may take on a slow machine.
_ANSWER: Final = 192
_SECONDS: Final = 900.0
_WITHOUT: Final = "score without the chat: --texts wiki code"


def given(option: Path | None, variable: str) -> Path | None:
    """A file by an option or a variable of the environment, None if neither says one.

    Raises:
        UserError: there is no such file.
    """
    value = option or (Path(os.environ[variable]).expanduser() if os.environ.get(variable) else None)
    if value is not None and not value.is_file():
        raise UserError(value, "no such file", f"give a text file, or unset {variable}")
    return value


def wiki() -> str:
    """WikiText-2's test split."""
    return wikitext.read(wikitext.test_path())


def code(option: Path | None) -> str:
    """Source code."""
    if path := given(option, CODE):
        return wikitext.read(path)
    sources = []
    for name in _MODULES:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None or not found.origin.endswith(".py"):
            raise UserError(f"{name}.py", "Python's library has no source of it here", f"give --code-text or {CODE}")
        sources.append(Path(found.origin).read_text(encoding="utf-8"))
    return "\n".join(sources)[:_CODE_CHARACTERS]


def training(option: Path | None) -> str:
    """What importance matrix and calibration learn from."""
    path = given(option, TRAINING)
    return read_text(BUNDLED) if path is None else wikitext.read(path)


def questions() -> list[str]:
    """One question a line."""
    return [line for line in QUESTIONS.read_text(encoding="utf-8").splitlines() if line.strip()]


def chat(folder: Path, f16: Path, server: Path, kept: Path, threads: int) -> str | None:
    """Conversations of one question and one answer each, as the model's template writes them.

    Args:
        folder: Hugging Face folder, for the template.
        f16: the file that answers.
        server: llama-server.
        kept: JSON file of the answers that are there already; answers are added to it one by one.
        threads: for the server.

    Returns:
        The text; None of a model without a template.

    Raises:
        UserError: the server fails, or the template.
    """
    with patched(folder, False) as transformers:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    if not tokenizer.chat_template:
        return None
    asked = questions()
    answers: dict[str, str] = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    missing = [question for question in asked if question not in answers]
    if missing:
        with _serving(server, f16, threads, kept.with_suffix(".log")) as ask:
            for question in tqdm(missing, desc="the model answers", unit="question"):
                answers[question] = ask(question)
                write_json(kept, answers)
    try:
        # Transformers renders templates in a sandbox of Jinja's.
        return "\n".join(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}, {"role": "assistant", "content": answers[question]}],
                tokenize=False,
            )
            for question in asked
        )
    except Exception as error:  # whatever the template raises
        raise UserError(folder, f"its chat template fails ({error})", _WITHOUT) from error


@contextmanager
def _serving(server: Path, model: Path, threads: int, log: Path) -> Iterator[Callable[[str], str]]:
    """llama-server, as long as the context lasts; what is yielded asks it a question."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["-m", model, "--port", port, "-t", threads, "-c", 1024, "-np", 1, "--no-webui", "--jinja"]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [str(server), *map(str, arguments)], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            _wait(process, port, log)
            yield lambda question: _ask(port, question, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen, port: int, log: Path) -> None:
    started = time.monotonic()
    while time.monotonic() - started < _SECONDS:
        if process.poll() is not None:
            break
        try:
            if _request(port, "GET", "/health", None)[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise UserError(log, "llama-server does not start", "the file holds all it printed")


def _request(port: int, method: str, path: str, body: object) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _ask(port: int, question: str, log: Path) -> str:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": _ANSWER}
    try:
        status, content = _request(port, "POST", "/v1/chat/completions", body)
        if status != 200:
            raise ValueError(f"answered with status {status}")
        return str(json.loads(content)["choices"][0]["message"]["content"] or "")
    except (OSError, ValueError, KeyError, IndexError, TypeError, http.client.HTTPException) as error:
        raise UserError(log, f"llama-server: {error}", "the file holds all it printed") from error


def with_marks_read(f16: Path, path: Path) -> dict[str, str]:
    """Copy an F16 file so that llama-perplexity reads the marks of a chat template as the tokens they are.

    The tool takes ``<|im_start|>`` in a text for several words and signs, because it does not parse control tokens;
    those that a user has defined it does parse. llama.cpp turns some back into control tokens by their names, so the
    copy has them in the other case: ``<|IM_START|>``.

    Returns:
        Name of a mark -> its name in the copy, for the text to be scored.

    Raises:
        UserError: the file has no list of tokens with their types.
    """
    partial = path.with_name(f"partial-{path.name}")
    shutil.copyfile(f16, partial)
    names = {}
    try:
        fields = gguf.GGUFReader(partial, "r+").fields
        types, tokens = (fields.get(key) for key in (gguf.Keys.Tokenizer.TOKEN_TYPE, gguf.Keys.Tokenizer.LIST))
        if types is None or tokens is None:
            raise UserError(f16, "has no types of tokens", _WITHOUT)
        known = {bytes(tokens.parts[index]) for index in tokens.data}
        for token, kind in zip(tokens.data, types.data, strict=True):
            if types.parts[kind][0] != gguf.TokenType.CONTROL:
                continue
            types.parts[kind][0] = gguf.TokenType.USER_DEFINED
            name = bytes(tokens.parts[token])
            other = name.swapcase()  # of ASCII alone: the bytes are as many
            if name != other and other not in known:
                tokens.parts[token][:] = np.frombuffer(other, dtype=np.uint8)
                names[name.decode(errors="replace")] = other.decode(errors="replace")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return names


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A text with the marks of a template under other names."""
    if not names:
        return text
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(pattern, lambda found: names[found[0]], text)
