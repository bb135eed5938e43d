"""A hub on this machine: as much of the Hugging Face hub's HTTP interface as an upload and a download ask for."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_ofthetest"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """What it was sent.

    Attributes:
        url: to be HF_ENDPOINT.
        repositories: name -> (private, file -> content).
        full: refuse large files.
        fetched: files that were downloaded, in the order they were asked for.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, tuple[bool, dict[str, bytes]]] = {}
        self.full = False
        self.fetched: list[str] = []
        self._objects: dict[str, bytes] = {}

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON for a request."""
        parts = urlsplit(path).path.strip("/").split("/")
        if method == "PUT" and parts[0] == "object":
            if self.full:
                return 403, {"error": "storage limit reached"}
            self._objects[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if parts[:3] == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.repositories:
                return 409, {"url": f"{self.url}/{name}", "error": "You already created this model repo"}
            self.repositories[name] = (asked.get("private") or asked.get("visibility") == "private", {})
            return 200, {"url": f"{self.url}/{name}"}
        if parts[:2] == ["api", "models"] and len(parts) >= 4 and parts[4:5] in ([], ["revision"], ["tree"]):
            return self._listing("/".join(parts[2:4]), tree="tree" in parts[4:5])
        if parts[:2] == ["api", "models"] and len(parts) >= 5:
            return self._model("/".join(parts[2:4]), parts[4], body)
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            objects = [
                {**entry, "actions": {"upload": {"href": f"{self.url}/object/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        return (200, {"errors": [], "warnings": []}) if parts == ["api", "validate-yaml"] else (404, {"error": path})

    def file(self, method: str, path: str) -> bytes | None:
        """Content of ``/name/resolve/revision/file``; None if the path has another form, or there is no such file."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        name = "/".join(parts[:2])
        if method not in ("GET", "HEAD") or parts[2:3] != ["resolve"] or name not in self.repositories:
            return None
        content = self.repositories[name][1].get("/".join(parts[4:]))
        if content is not None and method == "GET":
            self.fetched.append("/".join(parts[4:]))
        return content

    def _listing(self, name: str, *, tree: bool) -> tuple[int, Any]:
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        private, files = self.repositories[name]
        if tree:  # newer versions of huggingface_hub ask for it
            oid = "0" * 40
            return 200, [{"type": "file", "path": f, "size": len(c), "oid": oid} for f, c in sorted(files.items())]
        siblings = [{"rfilename": file} for file in sorted(files)]
        return 200, {"id": name, "sha": _COMMIT, "siblings": siblings, "private": private}

    def _model(self, name: str, action: str, body: bytes) -> tuple[int, Any]:
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(".gguf") else "regular",
                 "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            return 200, {"files": files}
        if action == "commit":
            kept = self.repositories[name][1]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    kept[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    kept[value["path"]] = self._objects[value["oid"]]
            url = f"{self.url}/{name}/commit/{_COMMIT}"
            return 200, {"success": True, "commitOid": _COMMIT, "commitUrl": url, "hookOutput": ""}
        return 200, {"id": name, "sha": _COMMIT, "siblings": [], "private": self.repositories[name][0]}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub on a free port of the loopback, as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if (content := hub.file(self.command, self.path)) is not None:
                self.send_response(200)
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", _COMMIT)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)
                return
            status, value = hub.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            answer = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        do_GET = do_PUT = do_HEAD = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    hub = FakeHub(f"http://localhost:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
