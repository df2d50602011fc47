"""What the tests of data/ share: bytes of shards made without data/, the GPT-2 ranks, running scripts, a
stand-in hub.

Everything a test compares with is built here from the facts (struct, base64, a plain loop), never by the code
that is being tested.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import tiktoken

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
EOT = 50256
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

if str(DATA) not in sys.path:
    sys.path.insert(0, str(DATA))


def shard(tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """The bytes of a shard, field by field; wrong ones too."""
    count = len(tokens) if count is None else count
    header = struct.pack("<3i", magic, version, count) + bytes(253 * 4)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


def vocabulary() -> Path:
    """The file of GPT-2's ranks in the wheel of mlx-whisper; the package is looked at, never imported."""
    spec = importlib.util.find_spec("mlx_whisper")
    assert spec is not None, ("the tests of data/ take GPT-2's ranks from the package mlx-whisper: "
                              "`pip install --no-deps mlx-whisper`, as ./run.sh test does")
    return Path(spec.submodule_search_locations[0]) / "assets" / "gpt2.tiktoken"


def plain_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding, straight from its published pattern and the file of ranks."""
    ranks = {}
    for line in vocabulary().read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return tiktoken.Encoding("oracle", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": EOT})


def oracle_shards(texts: list[str], shard_size: int, encoding: tiktoken.Encoding) -> dict[str, bytes]:
    """File name to bytes of the shards of `texts`: one process, one loop, no data/."""
    stream: list[int] = []
    for text in texts:
        stream.append(EOT)
        stream.extend(encoding.encode_ordinary(text))
    files = {}
    for index, start in enumerate(range(0, len(stream), shard_size)):
        kind = "val" if index == 0 else "train"
        files[f"fineweb_{kind}_{index:06d}.bin"] = shard(stream[start:start + shard_size])
    return files


def shards_in(folder: Path) -> dict[str, bytes]:
    """File name to bytes of every .bin file of `folder`."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def run(script: str, *arguments: object, timeout: float = 60, cwd: Path | None = None,
        **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of data/ as a user does; returns its code and output. An endless run fails the test."""
    return subprocess.run([sys.executable, str(DATA / script), *map(str, arguments)], capture_output=True,
                          encoding="utf-8", errors="replace", timeout=timeout, cwd=cwd,
                          env=os.environ | environment)


def assert_user_error(result: subprocess.CompletedProcess[str], *parts: object, code: int = 1) -> None:
    """The run ended with `code` and a message on stderr that holds `parts`, and with no traceback."""
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr + result.stdout, result.stderr
    for part in parts:
        assert str(part) in result.stderr, (part, result.stderr)


class StandInHub:
    """The hub's HTTP interface as far as a download needs it, on loopback, with files that misbehave on
    request.

    `files` maps a path in the dataset to its bytes. `faults` maps a path to the fault of its next requests,
    each used up by one GET: 'cut' sends half and drops the connection, 'short' serves half as if it were all,
    'slow' takes about a second, 'broken' answers 500, 'garbage' serves other bytes of the right length.
    """

    def __init__(self, repository: str, files: dict[str, bytes],
                 faults: dict[str, list[str]] | None = None, slow: float = 1.0) -> None:
        self.repository, self.files, self.faults, self.slow = repository, files, faults or {}, slow
        self.gets: list[str] = []
        self.most_at_once = self._now = 0
        self._lock = threading.Lock()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                with hub._lock:
                    hub._now += 1
                    hub.most_at_once = max(hub.most_at_once, hub._now)
                try:
                    hub._answer(self, body=True)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                finally:
                    with hub._lock:
                        hub._now -= 1

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def _answer(self, request: http.server.BaseHTTPRequestHandler, body: bool) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        listing = re.fullmatch(rf"/api/datasets/{self.repository}/tree/main/(.*)", path)
        found = re.fullmatch(rf"/datasets/{self.repository}/resolve/\w+/(.*)", path)
        if listing:
            rows = [{"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
                    for path, content in self.files.items() if path.startswith(listing[1].rstrip("/") + "/")]
            headers = {"Content-Type": "application/json"}
            return self._send(request, 200, headers, json.dumps(rows).encode(), body)
        if not found or found[1] not in self.files:
            return self._send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"", body)
        name, content = found[1], self.files[found[1]]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": "c" * 40,
                   "Accept-Ranges": "bytes"}
        pending = self.faults.get(name, [])
        fault = pending[0] if pending else ""
        if body:
            self.gets.append(name)
            if pending:
                pending.pop(0)
        if fault == "down" or fault == "broken" and body:
            return self._send(request, 500, {}, b"", body)
        if fault == "garbage":
            content = bytes(len(content))
        if fault == "short":
            content = content[:len(content) // 2]
        status, sent = 200, content
        start = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if start:
            status, sent = 206, content[int(start[1]):]
            headers["Content-Range"] = f"bytes {start[1]}-{len(content) - 1}/{len(content)}"
        if fault == "cut" and body:
            headers["Content-Length"] = str(len(sent))
            self._send(request, status, headers, sent[:len(sent) // 2], body)
            request.close_connection = True
            return None
        return self._send(request, status, headers, sent, body, delay=self.slow if fault == "slow" else 0.0)

    @staticmethod
    def _send(request: http.server.BaseHTTPRequestHandler, status: int, headers: dict[str, str],
              content: bytes, body: bool, delay: float = 0.0) -> None:
        request.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | headers).items():
            request.send_header(key, value)
        request.end_headers()
        if not body:
            return
        pieces = 10
        size = len(content) // pieces + 1
        for start in range(0, len(content), size):
            request.wfile.write(content[start:start + size])
            request.wfile.flush()
            time.sleep(delay / pieces)

    def __enter__(self) -> StandInHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"
