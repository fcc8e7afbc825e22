"""A small stand-in for the Hub's HTTP API: repositories are made, written in commits of LFS and plain files, and read."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any

ACCESS_TOKENS = {"hf_writes": "me", "hf_reads": "reader"}


class FakeHub(BaseHTTPRequestHandler):
    """`repositories`: name -> file -> bytes. `broken`: what is wrong, a part of an address -> a status, or "cut"."""

    protocol_version = "HTTP/1.1"
    repositories: dict[str, dict[str, bytes]]
    objects: dict[str, bytes]
    created: list[dict[str, Any]]
    broken: dict[str, int | str]
    requests: list[str]

    @classmethod
    def reset(cls) -> None:
        """An empty Hub on which nothing is wrong."""
        cls.repositories, cls.objects, cls.created, cls.broken, cls.requests = {}, {}, [], {}, []

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

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

    def answer(self) -> None:
        """One request, unless something is wrong with what it asks for."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append(f"{self.command} {self.path}")
        for part, problem in self.broken.items():
            if part in self.path:
                if problem == "cut":
                    self.close_connection = True
                    return self.connection.close()
                return self.reply(int(problem), {"error": "refused"})
        user = ACCESS_TOKENS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        path = self.path.partition("?")[0]
        if path.startswith("/objects/"):
            self.objects[path.rpartition("/")[2]] = body
            return self.reply(200)
        if found := re.fullmatch(r"/([\w.-]+/[\w.-]+)/resolve/[^/]+/(.+)", path):
            return self.resolve(*found.groups())
        if user is None:
            return self.reply(401, {"error": "Invalid credentials"})
        return self.write(path, body, user)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def resolve(self, name: str, file: str) -> None:
        """A file of a repository, with the Hub's headers."""
        files, commit = self.repositories.get(name), {"X_Repo_Commit": "c0ffee" + "0" * 34}
        if files is None:
            return self.reply(401, X_Error_Code="RepoNotFound")
        if file not in files:
            return self.reply(404, X_Error_Code="EntryNotFound", **commit)
        tag = hashlib.sha256(files[file]).hexdigest()
        return self.reply(200, content=files[file], ETag=f'"{tag}"', **commit)

    def write(self, path: str, body: bytes, user: str) -> None:
        """What a client with a token asks for."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or user}/{asked['name']}"
            if user == "reader":
                return self.reply(403, {"error": "no right to write"})
            if name in self.repositories:
                return self.reply(409, {"error": "exists", "url": self.url(name)})
            self.created.append(asked)
            self.repositories[name] = {".gitattributes": b""}
            return self.reply(200, {"url": self.url(name)})
        if path == "/api/whoami-v2":
            return self.reply(200, {"name": user, "type": "user"})
        if path.endswith("/info/lfs/objects/batch"):
            return self.lfs(json.loads(body))
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if found := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(preupload|commit|revision)/main", path):
            return getattr(self, found[2])(found[1], body)
        return self.reply(404, {"error": f"no {path}"})

    def url(self, name: str) -> str:
        return f"http://{self.headers['Host']}/{name}"

    def lfs(self, asked: dict[str, Any]) -> None:
        """Where large files are to be sent."""
        objects = [
            one | {"actions": {"upload": {"href": f"http://{self.headers['Host']}/objects/{one['oid']}", "header": {}}}}
            for one in asked["objects"]
        ]
        self.reply(200, {"transfer": "basic", "objects": objects})

    def preupload(self, name: str, body: bytes) -> None:
        """Which files are large."""
        files = json.loads(body)["files"]
        modes = [("lfs" if one["path"].endswith(".safetensors") else "regular") for one in files]
        rows = [
            {"path": one["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}
            for one, mode in zip(files, modes, strict=True)
        ]
        self.reply(200, {"files": rows})

    def commit(self, name: str, body: bytes) -> None:
        """Files of a commit: plain ones in it, large ones that were sent before."""
        for line in body.splitlines():
            row = json.loads(line)
            value = row["value"]
            if row["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            if row["key"] == "lfsFile":
                content = self.objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"] and len(content) == value["size"]
                self.repositories[name][value["path"]] = content
        self.reply(200, {"commitOid": "c0ffee" + "0" * 34, "commitUrl": self.url(name), "success": True})

    def revision(self, name: str, body: bytes) -> None:
        """What is known of a repository."""
        self.reply(200, {"id": name, "sha": "c0ffee" + "0" * 34, "siblings": [], "private": False, "tags": []})
