"""A bucket on this machine: the part of Google Cloud Storage's JSON API that this project, gcsfs
and TensorStore use, in memory, with faults (https://cloud.google.com/storage/docs/json_api/v1).

    with Bucket() as bucket: ...    # in a thread; `bucket.environment` sends every library to it

Faults are attributes, which may be set at any time, or by `python -m tests.bucket` over HTTP:

    POST /_set?fail=0.02&delay=0.01&…       GET /_count?reset=1

    fail      share of the requests that get 429, 500 or 503, or whose connection is cut before or
              after they are done
    delay     seconds before each answer
    hang      whether no request is answered
    forbidden, read_only    whether all requests, or all that write, get 403
    once_a_second    whether a second write to an object within a second gets 429
    only      a text: the faults are those of requests whose path or name holds it
"""

import base64
import contextlib
import hashlib
import http.server
import itertools
import json
import random
import re
import threading
import time
import urllib.parse

FAULTS = dict.fromkeys(("fail", "delay", "hang", "forbidden", "read_only", "once_a_second"), 0.0)


class Error(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, message: str):
        self.status, self.message = status, message


class Bucket:
    """The bucket gs://bucket, served at `port` (0: any free one).

    Args:
      beside: another server of the same objects, with faults of its own; None: a new bucket.

    Attributes:
      objects: name → object, a dict of its metadata with "data".
      counts: kind of request → [requests, bytes up, bytes down].
    """

    def __init__(self, port: int = 0, seed: int = 0, beside: "Bucket | None" = None):
        self.objects: dict[str, dict] = beside.objects if beside else {}
        self.counts: dict[str, list[int]] = {}
        self.faults, self.only = dict(FAULTS), ""
        self._uploads: dict[str, dict] = {}
        self._lock = beside._lock if beside else threading.RLock()
        self._generations = beside._generations if beside else itertools.count(time.time_ns())
        self._random = random.Random(seed)
        self.injected = 0  # requests that met a fault
        self._written: dict[str, float] = {}  # name → the time of its last write
        handler = type("BoundHandler", (_Handler,), {"bucket": self})
        self._server = _Server(("127.0.0.1", port), handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self.faults.update(FAULTS)
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that send google-cloud-storage, gcsfs and TensorStore here."""
        url = f"http://127.0.0.1:{self.port}"
        return {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def names(self, prefix: str = "") -> list[str]:
        with self._lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    # ---- what a request does

    def check(self, name: str, query: dict[str, str], reading: bool = False) -> dict | None:
        """Returns the object, after its preconditions were checked."""
        found = self.objects.get(name)
        generation = found["generation"] if found else "0"
        if query.get("ifGenerationMatch", generation) != generation:
            raise Error(412, "conditionNotMet")
        if query.get("ifGenerationNotMatch") == generation:
            raise Error(304 if reading else 412, "conditionNotMet")
        return found

    def store(self, name: str, data: bytes, query: dict[str, str], metadata: dict) -> dict:
        with self._lock:
            self.check(name, query)
            now = time.time()
            if self.faults["once_a_second"] and now - self._written.get(name, 0.0) < 1:
                raise Error(429, "rateLimitExceeded")
            self._written[name] = now
            stamp = (
                time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{now % 1:.3f}"[2:] + "Z"
            )
            generation = str(next(self._generations))
            self.objects[name] = {
                "kind": "storage#object",
                "name": name,
                "bucket": "bucket",
                "generation": generation,
                "metageneration": "1",
                "etag": generation,
                "size": str(len(data)),
                "timeCreated": stamp,
                "updated": stamp,
                "contentType": metadata.get("contentType", "application/octet-stream"),
                "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
                "data": data,
            }
            return _public(self.objects[name])

    def read(self, name: str, query: dict[str, str]) -> dict:
        with self._lock:
            found = self.check(name, query, reading=True)
            if found is None:
                raise Error(404, f"No such object: bucket/{name}")
            return dict(found)

    def delete(self, name: str, query: dict[str, str]) -> None:
        with self._lock:
            if self.check(name, query) is None:
                raise Error(404, f"No such object: bucket/{name}")
            del self.objects[name]

    def list(self, query: dict[str, str]) -> dict:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit = min(int(query.get("maxResults") or 1000), 1000)
        with self._lock:
            keys: dict[str, dict | None] = {}  # in order; None for a prefix
            for name in self.names(prefix):
                end = name.find(delimiter, len(prefix)) if delimiter else -1
                keys[name if end < 0 else name[: end + 1]] = (
                    None if end >= 0 else self.objects[name]
                )
            start = query.get("pageToken") or query.get("startOffset", "")
            left = [k for k in keys if (k > start if "pageToken" in query else k >= start)]
            left = [k for k in left if k < query.get("endOffset", "\U0010ffff")]
            page = left[:limit]
            answer = {
                "kind": "storage#objects",
                "items": [_public(keys[k]) for k in page if keys[k] is not None],
                "prefixes": [k for k in page if keys[k] is None],
            }
            if len(left) > limit:
                answer["nextPageToken"] = page[-1]
            return answer

    def begin_upload(self, name: str, query: dict[str, str], metadata: dict) -> str:
        with self._lock:
            number = str(next(self._generations))
            self._uploads[number] = {
                "name": name,
                "query": query,
                "metadata": metadata,
                "data": bytearray(),
            }
            return number

    def continue_upload(
        self, number: str, content_range: str, body: bytes
    ) -> tuple[int, dict, dict]:
        upload = self._uploads.get(number)
        if upload is None:
            raise Error(404, "no such upload")
        if "done" in upload:
            return 200, upload["done"], {}
        first, total = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", content_range).groups()
        if first is not None:
            upload["data"][int(first) :] = body
        if total != "*" and len(upload["data"]) >= int(total):
            data = bytes(upload["data"])
            upload["done"] = self.store(upload["name"], data, upload["query"], upload["metadata"])
            return 200, upload["done"], {}
        size = len(upload["data"])
        return 308, {}, {"Range": f"bytes=0-{size - 1}"} if size else {}

    # ---- faults

    def fate(self, what: str, writes: bool) -> str:
        """Waits as the faults say. Returns "", "cut before", "cut after" or a status."""
        if self.only not in what:
            return ""
        while self.faults["hang"]:
            time.sleep(0.02)
        time.sleep(self.faults["delay"])
        if self.faults["forbidden"] or (self.faults["read_only"] and writes):
            return "403"
        with self._lock:
            if self._random.random() < self.faults["fail"]:
                self.injected += 1
                return self._random.choice(("429", "500", "503", "cut before", "cut after"))
        return ""

    def count(self, kind: str, up: int, down: int) -> None:
        with self._lock:
            row = self.counts.setdefault(kind, [0, 0, 0])
            for i, value in enumerate((1, up, down)):
                row[i] += value


def _public(entry: dict) -> dict:
    return {name: value for name, value in entry.items() if name != "data"}


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request, client_address):
        """A client that was killed is no error."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    bucket: Bucket

    def log_message(self, *arguments):
        pass

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        body = self._body()
        if body is None:  # the client was killed while it sent: nothing happened
            self.close_connection = True
            return
        if url.path.startswith("/_"):
            self._answer(200, self._control(url.path, query))
            return
        path = urllib.parse.unquote(url.path)
        is_list = self.command == "GET" and path.endswith("/o")
        what = f"{path} {query.get('name', '')} {query.get('prefix', '')}"
        fate = self.bucket.fate(what, self.command in ("POST", "PUT", "PATCH", "DELETE"))
        if fate == "cut before":
            self._cut()
            return
        if fate.isdigit():
            self._answer(int(fate), _error(int(fate), "injected"))
            return
        try:
            status, content, headers = self._route(url.path, query, body)
        except Error as error:
            status, content, headers = error.status, _error(error.status, error.message), {}
        size = len(content) if isinstance(content, bytes) else 0
        self.bucket.count("list" if is_list else self.command.lower(), len(body), size)
        if fate == "cut after":
            self._cut()
            return
        self._answer(status, content, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _handle

    def _control(self, path: str, query: dict[str, str]) -> dict:
        bucket = self.bucket
        if path == "/_set":
            bucket.only = query.pop("only", bucket.only)
            bucket.faults.update({name: float(value) for name, value in query.items()})
            return bucket.faults
        counts = {kind: list(row) for kind, row in bucket.counts.items()}
        if query.get("reset"):
            bucket.counts = {}
        return counts

    def _body(self) -> bytes | None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        return body if len(body) == length else None

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.close()

    def _answer(self, status: int, content=b"", headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        if status in (204, 304):
            data = b""
        self.send_response(status)
        if not isinstance(content, bytes):
            self.send_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _route(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, object, dict]:
        if path.startswith("/batch"):
            return self._batch(body)
        path = path.replace("/storage/v1", "", 1)
        found = re.fullmatch(r"(/upload|/download|/resumable/upload)?/b/([^/]+)(/.*)?", path)
        if found is None:
            raise Error(404, f"no such call: {self.command} {path}")
        kind, bucket, rest = found[1] or "", found[2], found[3] or ""
        if bucket != "bucket":
            raise Error(404, "The specified bucket does not exist.")
        if rest == "":
            return 200, {"kind": "storage#bucket", "name": "bucket", "location": "HERE"}, {}
        if rest == "/storageLayout":
            return 200, {"bucket": "bucket", "hierarchicalNamespace": {"enabled": False}}, {}
        if "upload" in kind:
            return self._upload(query, body)
        name = urllib.parse.unquote(rest.removeprefix("/o").removeprefix("/"))
        if not name:
            return 200, self.bucket.list(query), {}
        if self.command == "DELETE":
            self.bucket.delete(name, query)
            return 204, b"", {}
        if self.command not in ("GET", "HEAD"):
            raise Error(405, f"{self.command} {path}")
        entry = self.bucket.read(name, query)
        if query.get("alt") != "media" and kind != "/download":
            return 200, _public(entry), {}
        return self._content(entry)

    def _content(self, entry: dict) -> tuple[int, bytes, dict]:
        data, headers = (
            entry["data"],
            {
                "x-goog-generation": entry["generation"],
                "x-goog-stored-content-length": entry["size"],
                "x-goog-hash": f"md5={entry['md5Hash']}",
                "Content-Type": entry["contentType"],
                "ETag": entry["etag"],
            },
        )
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            return 200, data, headers
        if asked[1]:
            first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        else:
            first, last = max(len(data) - int(asked[2]), 0), len(data) - 1
        if first >= len(data):
            raise Error(416, "Requested range not satisfiable")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return 206, data[first : last + 1], headers

    def _upload(self, query: dict[str, str], body: bytes) -> tuple[int, object, dict]:
        bucket = self.bucket
        if "upload_id" in query:
            content_range = self.headers.get("Content-Range")
            content_range = content_range or f"bytes 0-{max(len(body) - 1, 0)}/{len(body)}"
            return bucket.continue_upload(query["upload_id"], content_range, body)
        kind = query["uploadType"]
        if kind == "media":
            return 200, bucket.store(query["name"], body, query, {}), {}
        if kind == "multipart":
            boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1].encode()
            # Lines may end with \r\n or \n; the data are what is between the empty line and the
            # line end before the boundary.
            parts = re.split(rb"\r?\n--" + re.escape(boundary), b"\n" + body)[1:3]
            metadata, data = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in parts)
            metadata = json.loads(metadata)
            return (
                200,
                bucket.store(query.get("name") or metadata["name"], data, query, metadata),
                {},
            )
        metadata = json.loads(body or b"{}")
        name = query.get("name") or metadata["name"]
        number = bucket.begin_upload(name, query, metadata)
        place = f"http://{self.headers['Host']}/upload/storage/v1/b/bucket/o"
        options = urllib.parse.urlencode(
            {"uploadType": "resumable", "name": name, "upload_id": number}
        )
        return 200, b"", {"Location": f"{place}?{options}"}

    def _batch(self, body: bytes) -> tuple[int, object, dict]:
        """Deletes of many objects, as gcsfs sends them."""
        answers = []
        for number, path in re.findall(rb"Content-ID:\s*<?([^>\r\n]+).*?DELETE (\S+)", body, re.S):
            name = urllib.parse.unquote(path.decode().partition("/o/")[2].partition("?")[0])
            try:
                self.bucket.delete(name, {})
                status = b"204 No Content"
            except Error:
                status = b"404 Not Found"
            answers.append(
                b"--answer\r\nContent-Type: application/http\r\nContent-ID: <response-"
                + number
                + b">\r\n\r\nHTTP/1.1 "
                + status
                + b"\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        kind = {"Content-Type": "multipart/mixed; boundary=answer"}
        return 200, b"".join(answers) + b"--answer--\r\n", kind


def _error(status: int, message: str) -> dict:
    return {"error": {"code": status, "message": message, "errors": [{"message": message}]}}


if __name__ == "__main__":
    import sys

    with Bucket(port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as served:
        for variable, value in served.environment.items():
            print(f"export {variable}={value}", flush=True)
        threading.Event().wait()
