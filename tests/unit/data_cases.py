"""Small data sets for the tests of the data path, an HTTP server that fails on purpose, and a reference pipeline."""

from __future__ import annotations

import io
import random
import socket
import threading
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import simplejpeg
from PIL import Image

from bench.data import writer
from bench.worker import images, shards

CLASSES = 10


def jpeg(number: int, side: int = 24) -> bytes:
    draw = numpy.random.default_rng(number)
    return simplejpeg.encode_jpeg(draw.integers(0, 256, (side, side, 3), numpy.uint8), quality=50)


def make(folder: Path, counts: list[int], change: Callable[[int, bytes], bytes] = lambda _, data: data) -> shards.Index:
    """Shards with that many samples each; the samples have consecutive numbers."""
    target = writer.Folder(folder, {"kind": "test", "source": "test", "classes": CLASSES})
    number = 0
    groups = []
    for shard, count in enumerate(counts):
        items = []
        for _ in range(count):
            load = partial(lambda n: change(n, jpeg(n)), number)
            items.append(writer.Item(f"s{number:05d}", number % CLASSES, load, f"s{number}"))
            number += 1
        groups.append((f"t-{shard:03d}.tar", items))
    list(writer.build(target, groups, lambda _: None, lambda _: None))
    return shards.load_index(str(folder))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    # Failures of the next requests for shards, in order; None serves the request.
    trouble: list[str | None]
    # Set while the server is unreachable.
    gone: threading.Event

    def do_GET(self) -> None:
        if self.gone.is_set():
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        path = self.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1 if last else None]
        trouble = self.trouble.pop(0) if path.suffix == ".tar" and self.trouble else None
        if trouble == "silent":
            self.gone.wait(5)
            self.close_connection = True
            return
        if trouble in ("403", "503"):
            self.send_error(int(trouble))
            return
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if trouble == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(root: Path, trouble: list[str | None] | None = None):
    """Serve the folder over HTTP on loopback; yield its address and the handler class."""
    kind = type("Case", (Handler,), {"root": root, "trouble": trouble or [], "gone": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", kind
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def pillow_pipeline(data: bytes, draw: random.Random, pixels: int = images.PIXELS) -> numpy.ndarray:
    """The same crop as images.augment, by what most training scripts use: Pillow at full size, then ToTensor."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    left, top, width, height = images.crop_box(draw, *image.size)
    image = image.crop((left, top, left + width, top + height)).resize((pixels, pixels), Image.Resampling.BILINEAR)
    if draw.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    # torchvision's ToTensor and Normalize, step by step.
    planes = numpy.ascontiguousarray(numpy.array(image).transpose(2, 0, 1))
    tensor = planes.astype(numpy.float32) / numpy.float32(255)
    tensor -= numpy.array(images.MEAN, numpy.float32)[:, None, None]
    tensor /= numpy.array(images.DEVIATION, numpy.float32)[:, None, None]
    return tensor
