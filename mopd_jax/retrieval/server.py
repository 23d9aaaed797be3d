"""A search server over any retriever (the Search-R1 protocol, see `http.HTTPSearch`)."""

import http.server
import json
import threading
from typing import Any

from absl import logging

from mopd_jax.retrieval.jsonl import parse_json
from mopd_jax.retrieval.search import Document, Retriever

LONGEST_BODY = 2**24
"""Bytes of a request."""
MOST_DOCUMENTS = 1000
"""Documents per query."""
TOPK = 3
"""Documents per query where a request does not say."""
IDLE_S = 600
"""Seconds after which a connection without requests is closed."""


class SearchServer(http.server.ThreadingHTTPServer):
    """Answers `POST /retrieve`; connections are kept, searches run one at a time.

    A request that is none is answered with status 400 and a failed search with 500, both with
    `{"detail": what was wrong}`.
    """

    daemon_threads = True

    def __init__(self, retriever: Retriever, host: str, port: int):
        """Binds the address; port 0 takes any free one (see `server_port`). `serve_forever` answers."""
        super().__init__((host, port), _Handler)
        self._retriever, self._lock = retriever, threading.Lock()

    def answer(self, body: bytes) -> dict[str, Any]:
        """Returns the answer to a request's body.

        Raises:
          _BadRequest: it is no request.
        """
        queries, k, with_scores = _request(body)
        with self._lock:
            found = self._retriever.search(queries, k)
        return {"result": [[_hit(document, with_scores) for document in hits] for hits in found]}


class _BadRequest(ValueError):
    """What is wrong with a request, in words."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if self.path != "/retrieve":
            self._refuse(404, f"found path {self.path}, expected /retrieve")
        elif not length.isascii() or not length.isdigit():
            self._refuse(411, "found no Content-Length, expected the size of the body in bytes")
        elif int(length) > LONGEST_BODY:
            self._refuse(413, f"found a body of {length} bytes, expected at most {LONGEST_BODY}")
        else:
            self._reply(*self._search(self.rfile.read(int(length))))

    def _search(self, body: bytes) -> tuple[int, dict[str, Any]]:
        try:
            return 200, self.server.answer(body)
        except _BadRequest as error:
            return 400, {"detail": str(error)}
        except Exception as error:  # whatever a backend fails with, the client has to hear of it
            logging.exception("A search failed")
            return 500, {"detail": f"{type(error).__name__}: {error}"}

    def _refuse(self, status: int, detail: str) -> None:
        self.close_connection = True  # the body was not read, so nothing after it can be
        self._reply(status, {"detail": detail})

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logging.debug(format, *args)


def _request(body: bytes) -> tuple[list[str], int, bool]:
    try:
        request = parse_json(body)
    except ValueError as error:
        raise _BadRequest(f"not JSON ({error})") from error
    if not isinstance(request, dict):
        raise _BadRequest(f"found a JSON {type(request).__name__}, expected an object")
    queries, k, with_scores = (
        request.get("queries"),
        request.get("topk"),
        request.get("return_scores", False),
    )
    k = TOPK if k is None else k  # null is as good as absent
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise _BadRequest(f"found queries = {queries!r:.120}, expected a list of texts")
    if type(k) is not int or not 0 < k <= MOST_DOCUMENTS:
        raise _BadRequest(f"found topk = {k!r:.120}, expected a whole number from 1 to {MOST_DOCUMENTS}")
    if not isinstance(with_scores, bool):
        raise _BadRequest(f"found return_scores = {with_scores!r:.120}, expected true or false")
    return queries, k, with_scores


def _hit(document: Document, with_score: bool) -> dict[str, Any]:
    found = {"id": document.id, "contents": document.contents}
    return {"document": found, "score": document.score} if with_score else found
