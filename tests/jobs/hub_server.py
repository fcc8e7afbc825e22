"""A small fake of the Hub's HTTP API: repositories are created, written in commits of LFS and regular files, and
read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any

ACCESS_TOKENS = {"hf_writes": "me", "hf_reads": "reader"}


class FakeHub(BaseHTTPRequestHandler):
    """`repositories`: name -> file -> bytes. `broken`: part of a URL -> an HTTP status, or "cut" for a truncated
    response."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, dict[str, bytes]]
    objects: dict[str, bytes]
    created: list[dict[str, Any]]
    broken: dict[str, int | str]
    requests: list[str]

    @classmethod
    def reset(cls) -> None:
        """Reset to an empty Hub without faults."""
        cls.repositories, cls.objects, cls.created, cls.broken, cls.requests = {}, {}, [], {}, []

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing on stderr."""

    def reply(self, status: int, plain: Any = None, content: bytes | None = None, **headers: str) -> None:
        body = content if content is not None else json.dumps(plain if plain is not None else {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_request(self) -> None:
        """Handle one request, unless a fault is set for its URL."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append(f"{self.command} {self.path}")
        for url_part, problem in self.broken.items():
            if url_part in self.path:
                if problem == "cut":
                    self.close_connection = True
                    return self.connection.close()
                return self.reply(int(problem), {"error": "refused"})
        user = ACCESS_TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        path = self.path.partition("?")[0]
        if path.startswith("/objects/"):
            self.objects[path.rpartition("/")[2]] = body
            return self.reply(200)
        if match := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)", path):
            return self.resolve(*match.groups())
        if user is None:
            return self.reply(401, {"error": "Invalid credentials"})
        return self.write(path, body, user)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def resolve(self, name: str, file: str) -> None:
        """Send a file of a repository with the Hub's headers."""
        files, commit = self.repositories.get(name), {"X_Repo_Commit": "c0ffee" + "0" * 34}
        if files is None:
            return self.reply(401, X_Error_Code="RepoNotFound")
        if file not in files:
            return self.reply(404, X_Error_Code="EntryNotFound", **commit)
        tag = hashlib.sha256(files[file]).hexdigest()
        return self.reply(200, content=files[file], ETag=f'"{tag}"', **commit)

    def write(self, path: str, body: bytes, user: str) -> None:
        """Handle a request of a client with a token."""
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request.get('organization') or user}/{request['name']}"
            if user == "reader":
                return self.reply(403, {"error": "no right to write"})
            if name in self.repositories:
                return self.reply(409, {"error": "exists", "url": self.url(name)})
            self.created.append(request)
            self.repositories[name] = {".gitattributes": b""}
            return self.reply(200, {"url": self.url(name)})
        if path == "/api/whoami-v2":
            return self.reply(200, {"name": user, "type": "user"})
        if path.endswith("/info/lfs/objects/batch"):
            return self.lfs(json.loads(body))
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(preupload|commit|revision)/main", path):
            return getattr(self, match[2])(match[1], body)
        return self.reply(404, {"error": f"no {path}"})

    def url(self, name: str) -> str:
        return f"http://{self.headers['Host']}/{name}"

    def lfs(self, request: dict[str, Any]) -> None:
        """Return the upload URLs of large files."""
        objects = [
            file
            | {"actions": {"upload": {"href": f"http://{self.headers['Host']}/objects/{file['oid']}", "header": {}}}}
            for file in request["objects"]
        ]
        self.reply(200, {"transfer": "basic", "objects": objects})

    def preupload(self, name: str, body: bytes) -> None:
        """Return which files are large."""
        files = json.loads(body)["files"]
        modes = [("lfs" if file["path"].endswith(".safetensors") else "regular") for file in files]
        entries = [
            {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}
            for file, mode in zip(files, modes, strict=True)
        ]
        self.reply(200, {"files": entries})

    def commit(self, name: str, body: bytes) -> None:
        """Store the files of a commit: regular files are in it, large ones were uploaded before."""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            if entry["key"] == "lfsFile":
                content = self.objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"] and len(content) == value["size"]
                self.repositories[name][value["path"]] = content
        self.reply(200, {"commitOid": "c0ffee" + "0" * 34, "commitUrl": self.url(name), "success": True})

    def revision(self, name: str, body: bytes) -> None:
        """Return the description of a repository."""
        self.reply(200, {"id": name, "sha": "c0ffee" + "0" * 34, "siblings": [], "private": False, "tags": []})
