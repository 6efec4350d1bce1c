"""Read a range of bytes in order, from a file or over HTTP."""

import http.client
import logging
import os
import time
import urllib.parse

ATTEMPTS = 6
FIRST_PAUSE = 0.2
TIMEOUT = 5.0
TRANSIENT = (OSError, http.client.HTTPException)
log = logging.getLogger(__name__)


class StreamError(OSError):
    """The server refused the request, or every attempt failed."""


class FileStream:
    """Bytes start to stop of a file."""

    def __init__(self, path: str, start: int, stop: int) -> None:
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self.file, start, stop - start, os.POSIX_FADV_SEQUENTIAL)
        os.lseek(self.file, start, os.SEEK_SET)

    def fill(self, view: memoryview) -> int:
        """Fill the view and return the bytes read: fewer than its size only at the end of the file."""
        got = 0
        while got < len(view):
            count = os.readv(self.file, [view[got:] if got else view])
            if not count:
                break
            got += count
        return got

    def close(self) -> None:
        os.close(self.file)


class HttpStream:
    """Bytes start to stop of a URL, by range requests. A broken connection is opened again where it broke."""

    def __init__(self, url: str, start: int, stop: int | None) -> None:
        self.url = url
        parts = urllib.parse.urlsplit(url)
        self.connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self.host, self.path = parts.netloc, urllib.parse.quote(parts.path)
        self.position, self.stop = start, stop
        self.connection: http.client.HTTPConnection | None = None
        self.failures = 0
        self.response: http.client.HTTPResponse | None = self.open()

    def open(self) -> http.client.HTTPResponse:
        while True:
            try:
                return self.request()
            except (FileNotFoundError, StreamError):
                raise
            except TRANSIENT as error:
                self.retry(error)

    def request(self) -> http.client.HTTPResponse:
        self.connection = self.connect(self.host, timeout=TIMEOUT)
        last = "" if self.stop is None else str(self.stop - 1)
        ranged = self.stop is not None or self.position > 0
        headers = {"Range": f"bytes={self.position}-{last}"} if ranged else {}
        self.connection.request("GET", self.path, headers=headers)
        response = self.connection.getresponse()
        if response.status == 404:
            raise FileNotFoundError(2, "no such file on the server")
        if response.status >= 500:
            raise http.client.HTTPException(f"status {response.status}")
        if response.status != (206 if ranged else 200):
            hint = "; enable range requests on the server" if response.status == 200 else ""
            raise StreamError(f"status {response.status}{hint}")
        return response

    def retry(self, error: Exception) -> None:
        """Wait before the next attempt, longer each time; raise an error after the last one."""
        self.close()
        self.failures += 1
        reason = str(error) or type(error).__name__
        if self.failures >= ATTEMPTS:
            raise StreamError(f"{reason}; gave up after {ATTEMPTS} attempts") from None
        log.warning("%s: error: %s; attempt %d of %d", self.url, reason, self.failures, ATTEMPTS)
        time.sleep(FIRST_PAUSE * 2**self.failures)

    def fill(self, view: memoryview) -> int:
        """Fill the view and return the bytes read: fewer than its size only at the end of the file."""
        got = 0
        while got < len(view):
            response = self.response = self.response or self.open()
            try:
                count = response.readinto(view[got:])
            except TRANSIENT as error:
                self.retry(error)
                continue
            if count:
                got += count
                self.position += count
                self.failures = 0
            elif not response.length:
                # The server sent all that it announced, so the file ends here.
                break
            else:
                self.retry(http.client.IncompleteRead(b""))
        return got

    def read_all(self) -> bytes:
        while True:
            response = self.response = self.response or self.open()
            try:
                return response.read()
            except TRANSIENT as error:
                self.retry(error)

    def close(self) -> None:
        self.response = None
        if self.connection:
            self.connection.close()


Stream = FileStream | HttpStream
