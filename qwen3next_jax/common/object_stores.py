"""The requests to Google Cloud Storage and to S3 with which `storage.BucketPath` is implemented.

An object in a bucket consists of a key and bytes. An object appears whole or not at all. Every
write gives the object a new version (the generation of Google Cloud Storage, the ETag of S3). A
write may demand the version that it replaces, so that the store refuses one of two concurrent
writers (RFC 9110, section 13.1; Google Cloud Storage: `ifGenerationMatch`).

Every function here makes one request and does not repeat it. `with_retries` repeats requests.
"""

import base64
import contextlib
import errno
import functools
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from qwen3next_jax.common.errors import ExitCode, UserError, error_message, one_line
from qwen3next_jax.common.installation import how_to_install

ABSENT = ""  # the version of an object that does not exist
_TIMEOUT = 20.0  # seconds in which a request must be answered
_CONNECTIONS = 64  # of this process to one store
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0  # seconds between two attempts


class FileInfo(NamedTuple):
    """An object as a listing describes it.

    Attributes:
      key: its name in the bucket.
      size: its bytes.
      version: the version of its content.
      md5: the MD5 of its content in hexadecimal digits; "" if the store does not know it.
      modified: when it was last written, in seconds since 1970, by the clock of the store.
    """

    key: str
    size: int
    version: str
    md5: str
    modified: float


class VersionConflict(OSError):
    """The object has another version than the write demanded: someone else has written it."""


class StoreError(OSError, UserError):
    """A store refused or failed a request; the error says nothing about the content of an object.
    Commands print this error as one line, as they do with every UserError.
    """

    def __init__(self, number: int, reason: str, url: str):
        OSError.__init__(self, number, reason, url)
        self.exit_code = ExitCode.USER_ERROR

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class AccessForbidden(StoreError, PermissionError):
    """The account may not make this request (HTTP 401, 403), or there are no credentials."""


class StoreUnavailable(StoreError):
    """The store did not answer, or asked to try again later (HTTP 408, 429, 5xx)."""

    def __init__(self, number: int, reason: str, url: str):
        super().__init__(number, reason, url)
        self.exit_code = ExitCode.STORAGE


class ObjectStore(Protocol):
    """One bucket.

    All methods may raise AccessForbidden and StoreUnavailable, and, for a missing object or bucket,
    FileNotFoundError.
    """

    def read(self, key: str, start: int, stop: int | None) -> bytes:
        """Returns the bytes of an object from number `start` (the first byte is 0) up to, but not
        including, number `stop`; to the end if `stop` is None.
        """

    def stat(self, key: str) -> FileInfo:
        """Returns the entry of one object."""

    def list(self, prefix: str, deep: bool, limit: int | None) -> tuple[list[FileInfo], list[str]]:
        """Returns the objects whose keys begin with `prefix`, in the order of their keys. Unless
        `deep` is true, the first result leaves out objects whose keys have a "/" after `prefix`;
        the second result holds the beginnings of their keys, up to this "/". `limit` is the largest
        number of objects to return; None: all.
        """

    def write(self, key: str, data: bytes, replaces: str | None) -> str:
        """Writes an object and returns its version. `replaces` is the version that the object must
        have; ABSENT: the object may not exist; None: any version, or none.

        Raises:
          VersionConflict: the object has another version.
        """

    def upload(self, key: str, file: str) -> None:
        """Writes an object with the content of a local file, which need not fit into memory."""

    def delete(self, key: str) -> None:
        """Deletes an object."""


@functools.cache
def open_store(scheme: str, bucket: str) -> ObjectStore:
    """Returns the bucket of gs:// or s3://.

    Raises:
      UserError: the packages for this kind of bucket are not installed, or there are no
        credentials.
    """
    return {"gs": _GoogleStorage, "s3": _S3}[scheme](bucket)


def with_retries(
    attempt: Callable[[int], Any], patience: float, on_retry: Callable[[], None] = lambda: None
) -> Any:
    """Calls `attempt(0)`, `attempt(1)`, … until a call succeeds, and returns its result. Repeats
    the attempt while it raises StoreUnavailable, with pauses that double and are drawn at random
    ("full jitter", so that many hosts do not come back at once).

    Args:
      attempt: makes a request.
      patience: the last attempt begins at most this many seconds after the first.
      on_retry: called before each pause; it may raise an error, which ends the attempts.

    Raises:
      StoreUnavailable: no attempt succeeded.
    """
    end, number, wait = time.monotonic() + patience, 0, _FIRST_WAIT
    while True:
        try:
            return attempt(number)
        except StoreUnavailable:
            if time.monotonic() >= end:
                raise
        on_retry()
        time.sleep(min(random.uniform(wait / 2, wait), max(end - time.monotonic(), 0.0)))
        number, wait = number + 1, min(2 * wait, _LONGEST_WAIT)


class _GoogleStorage:
    """A bucket of Google Cloud Storage (gs://), through the JSON API. google.cloud.storage finds
    the credentials.
    """

    def __init__(self, bucket: str):
        try:
            import google.auth.exceptions
            import requests.adapters
            from google.cloud import storage
        except ImportError as error:
            raise UserError(
                f"gs://{bucket}: gs:// needs the packages gcsfs and google-cloud-storage: "
                f"{how_to_install('gcs')}"
            ) from error
        try:
            client = storage.Client()
        except (google.auth.exceptions.GoogleAuthError, OSError) as error:
            raise UserError(
                f"gs://{bucket}: no credentials for Google Cloud ({one_line(str(error))}): run "
                "gcloud auth application-default login, or give the machine a service account"
            ) from error
        # By default a session has ten connections, and warns of more.
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS)
        client._http.mount("https://", adapter)
        client._http.mount("http://", adapter)
        self._client, self._bucket = client, client.bucket(bucket)
        self._options = {"timeout": _TIMEOUT, "retry": None}

    def read(self, key: str, start: int, stop: int | None) -> bytes:
        if stop is not None and stop <= start:
            return b""
        with self._translated_errors(key):
            end = None if stop is None else stop - 1
            return self._bucket.blob(key).download_as_bytes(
                start=start or None,
                end=end,
                raw_download=True,
                checksum=None if start or stop else "md5",
                **self._options,
            )

    def stat(self, key: str) -> FileInfo:
        with self._translated_errors(key):
            blob = self._bucket.blob(key)
            blob.reload(**self._options)
            return _file_info_of_blob(blob)

    def list(self, prefix: str, deep: bool, limit: int | None) -> tuple[list[FileInfo], list[str]]:
        with self._translated_errors(prefix):
            pages = self._client.list_blobs(
                self._bucket,
                prefix=prefix,
                delimiter=None if deep else "/",
                max_results=limit,
                **self._options,
            )
            entries = [_file_info_of_blob(blob) for blob in pages]
            return entries, sorted(pages.prefixes)

    def write(self, key: str, data: bytes, replaces: str | None) -> str:
        with self._translated_errors(key):
            blob = self._bucket.blob(key)
            match = None if replaces is None else int(replaces or 0)
            blob.upload_from_string(
                data, if_generation_match=match, checksum="md5", **self._options
            )
            return str(blob.generation)

    def upload(self, key: str, file: str) -> None:
        with self._translated_errors(key):
            self._bucket.blob(key).upload_from_filename(file, checksum="md5", **self._options)

    def delete(self, key: str) -> None:
        with self._translated_errors(key):
            self._bucket.blob(key).delete(**self._options)

    @contextlib.contextmanager
    def _translated_errors(self, key: str) -> Iterator[None]:
        """Turns errors of Google's libraries into the errors that `ObjectStore` names, or else into
        an OSError.
        """
        import google.api_core.exceptions as api
        import google.auth.exceptions as auth
        import requests

        url = f"gs://{self._bucket.name}/{key}"
        try:
            yield
        except api.NotFound as error:
            raise FileNotFoundError(errno.ENOENT, _server_message(error), url) from error
        except api.PreconditionFailed as error:
            raise VersionConflict(errno.EEXIST, "written by another process", url) from error
        except (api.Forbidden, api.Unauthorized) as error:
            raise AccessForbidden(errno.EACCES, _server_message(error), url) from error
        except (api.TooManyRequests, api.ServerError) as error:
            raise StoreUnavailable(errno.EAGAIN, _server_message(error), url) from error
        except api.GoogleAPICallError as error:
            kind = StoreUnavailable if error.code == 408 else OSError
            raise kind(errno.EIO, _server_message(error), url) from error
        except auth.TransportError as error:
            raise StoreUnavailable(errno.EAGAIN, one_line(str(error)), url) from error
        except auth.GoogleAuthError as error:
            kind = StoreUnavailable if error.retryable else AccessForbidden
            raise kind(errno.EACCES, one_line(str(error)), url) from error
        except (requests.ConnectionError, requests.Timeout) as error:
            raise StoreUnavailable(errno.EAGAIN, type(error).__name__, url) from error
        except requests.RequestException as error:  # such as an answer that was cut short
            raise StoreUnavailable(errno.EAGAIN, type(error).__name__, url) from error
        except _checksum_error_types() as error:
            raise StoreUnavailable(errno.EIO, "the content arrived damaged", url) from error


def _checksum_error_types() -> tuple[type[Exception], ...]:
    from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

    return (DataCorruption, InvalidResponse)


def _server_message(error: Any) -> str:
    """Returns the code and the message of an answer of Google Cloud Storage in one line."""
    # The text of an error repeats the request before the answer.
    found = re.search(r'"message": "([^"]*)"', error.message or "")
    message = error.errors[0].get("message") if error.errors else found and found[1]
    return one_line(f"HTTP {error.code.value}: {message or type(error).__name__}")


def _file_info_of_blob(blob: Any) -> FileInfo:
    md5 = base64.b64decode(blob.md5_hash).hex() if blob.md5_hash else ""
    return FileInfo(blob.name, blob.size, str(blob.generation), md5, blob.updated.timestamp())


class _S3:
    """s3://, by botocore, which s3fs brings."""

    def __init__(self, bucket: str):
        try:
            import botocore.config
            import botocore.session
        except ImportError as error:
            raise UserError(
                f"s3://{bucket}: s3:// needs the package s3fs: {how_to_install('s3')}"
            ) from error
        self._bucket = bucket
        self._client = botocore.session.get_session().create_client(
            "s3",
            config=botocore.config.Config(
                connect_timeout=_TIMEOUT,
                read_timeout=_TIMEOUT,
                max_pool_connections=_CONNECTIONS,
                retries={"total_max_attempts": 1},
            ),
        )

    def read(self, key: str, start: int, stop: int | None) -> bytes:
        if stop is not None and stop <= start:
            return b""
        range_argument = {}
        if start or stop is not None:
            range_argument = {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        with self._translated_errors(key):
            answer = self._client.get_object(Bucket=self._bucket, Key=key, **range_argument)
            return answer["Body"].read()

    def stat(self, key: str) -> FileInfo:
        with self._translated_errors(key):
            head = self._client.head_object(Bucket=self._bucket, Key=key)
        return _file_info_of_s3({"Key": key, "Size": head["ContentLength"]} | head)

    def list(self, prefix: str, deep: bool, limit: int | None) -> tuple[list[FileInfo], list[str]]:
        entries, folders, token = [], [], {}
        delimiter = {} if deep else {"Delimiter": "/"}
        limits = {} if limit is None else {"MaxKeys": limit}
        while True:
            with self._translated_errors(prefix):
                page = self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=prefix, **delimiter, **limits, **token
                )
            entries += map(_file_info_of_s3, page.get("Contents", ()))
            folders += [folder["Prefix"] for folder in page.get("CommonPrefixes", ())]
            if not page.get("IsTruncated") or limit is not None:
                return entries, sorted(folders)
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def write(self, key: str, data: bytes, replaces: str | None) -> str:
        condition = {}
        if replaces is not None:
            condition = {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
        with self._translated_errors(key):
            answer = self._client.put_object(Bucket=self._bucket, Key=key, Body=data, **condition)
        return answer["ETag"]

    def upload(self, key: str, file: str) -> None:
        with self._translated_errors(key), open(file, "rb") as body:
            self._client.put_object(Bucket=self._bucket, Key=key, Body=body)

    def delete(self, key: str) -> None:
        with self._translated_errors(key):
            self._client.delete_object(Bucket=self._bucket, Key=key)

    @contextlib.contextmanager
    def _translated_errors(self, key: str) -> Iterator[None]:
        """Converts the errors of botocore to the errors that `ObjectStore` names."""
        import botocore.exceptions as boto

        url = f"s3://{self._bucket}/{key}"
        try:
            yield
        except boto.ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = error.response.get("Error", {}).get("Code", "")
            said = f"HTTP {status}: {error_message(error)}"
            if status == 404:
                raise FileNotFoundError(errno.ENOENT, said, url) from error
            if status in (409, 412) and code != "BucketAlreadyExists":
                raise VersionConflict(errno.EEXIST, "written by another process", url) from error
            if status in (401, 403):
                raise AccessForbidden(errno.EACCES, said, url) from error
            kind = StoreUnavailable if status in (408, 429) or status >= 500 else OSError
            raise kind(errno.EIO, said, url) from error
        except (boto.NoCredentialsError, boto.PartialCredentialsError) as error:
            raise AccessForbidden(errno.EACCES, one_line(str(error)), url) from error
        except (
            boto.HTTPClientError,
            boto.ConnectionError,
            boto.IncompleteReadError,
            boto.ResponseStreamingError,
        ) as error:
            raise StoreUnavailable(errno.EAGAIN, type(error).__name__, url) from error
        except boto.BotoCoreError as error:
            raise OSError(errno.EIO, one_line(str(error)), url) from error


def _file_info_of_s3(entry: dict[str, Any]) -> FileInfo:
    # The ETag is no MD5 if the object is encrypted by a key of KMS or was uploaded in parts, and
    # its form does not tell.
    return FileInfo(
        entry["Key"], entry["Size"], entry["ETag"], "", entry["LastModified"].timestamp()
    )


_patience_lock = threading.Lock()
_patience_of_fsspec = 0.0


def set_gcsfs_patience(seconds: float) -> None:
    """Lets gcsfs, with which Orbax makes its small requests through etils, repeat a request for
    `seconds`, as `with_retries` does. By itself gcsfs gives up after half a minute.
    """
    global _patience_of_fsspec
    with _patience_lock:
        first, _patience_of_fsspec = not _patience_of_fsspec, seconds
    if not first:
        return
    import fsspec
    import gcsfs.core
    import gcsfs.retry

    # It logs every failed attempt with a traceback. What finally fails is an exception.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)

    class PatientGCSFileSystem(gcsfs.core.GCSFileSystem):
        cachable = True

        async def _request(self, *args, **options):
            end = time.monotonic() + _patience_of_fsspec
            while True:
                try:
                    return await super()._request(*args, **options)
                except Exception as error:
                    if not gcsfs.retry.is_retriable(error) or time.monotonic() >= end:
                        raise

    for scheme in ("gs", "gcs"):
        fsspec.register_implementation(scheme, PatientGCSFileSystem, clobber=True)
