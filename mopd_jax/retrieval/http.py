"""Client of a search server over HTTP (the Search-R1 protocol)."""

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import parse_json
from mopd_jax.retrieval.search import Document, SearchError

FIRST_WAIT_S = 0.5
"""Wait before the first retry; each further one is twice as long [D]."""

LONGEST_WAIT_S = 30.0
_PIECE = 2**16
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class HTTPSearch:
    """A retriever behind `POST url {"queries": [str], "topk": int, "return_scores": bool}`.

    The server answers `{"result": [[{"document": {"id", "contents"}, "score"}, …], …]}`, one list per
    query, best first; bare documents are read too. Scores are always asked for, because the protocol's
    original server fails without them. An empty list is the server's word that nothing matched and is
    passed on as such; anything else that is not a full answer is a fault.

    One connection is kept and used again. No proxy is used and no redirection followed: the address is
    that of the server itself.
    """

    identity: str
    """"http:" and the url."""

    def __init__(
        self,
        url: str,
        timeout_s: float = 30.0,
        retries: int = 4,
        max_batch: int = 256,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Nothing is sent yet.

        Args:
          url: the whole address, e.g. http://10.0.0.2:8000/retrieve.
          timeout_s: seconds until the whole answer must be there.
          retries: further tries after a failed request.
          max_batch: most queries in one request.
          sleep: waits so many seconds between two tries.

        Raises:
          Refusal: `url` is no http or https address.
        """
        self._url, self._timeout_s, self._retries = url, timeout_s, retries
        self._max_batch, self._sleep = max_batch, sleep
        parts = _split(url)
        self._target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._connection = _CONNECTIONS[parts.scheme](parts.hostname, parts.port)
        self.identity = f"http:{url}"

    def search(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        """Returns one tuple per query, best first, at most `k` documents, none repeated.

        Raises:
          SearchError: a request failed `1 + retries` times: no connection, no answer in time, an error
            status, half a body, or an answer of the wrong shape or count.
        """
        starts = range(0, len(queries), self._max_batch)
        return [found for i in starts for found in self._ask(queries[i : i + self._max_batch], k)]

    def _ask(self, queries: Sequence[str], k: int) -> list[tuple[Document, ...]]:
        body = json.dumps({"queries": list(queries), "topk": k, "return_scores": True}).encode()
        wait = FIRST_WAIT_S
        for retries_left in range(self._retries, -1, -1):
            try:
                return _documents(self._post(body), len(queries), k)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._connection.close()
                if not retries_left:
                    raise SearchError(
                        f"{self._url} failed {1 + self._retries} times, at last with {type(error).__name__}: "
                        f"{error}. Check that the server runs and speaks the Search-R1 protocol, or raise "
                        "retrieval.timeout_s or retrieval.retries."
                    ) from error
            self._sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _post(self, body: bytes) -> bytes:
        """Returns the body of a successful answer that was there in time."""
        deadline = time.monotonic() + self._timeout_s
        found = bytearray()
        with self._request(body, deadline) as answer:
            while piece := answer.read1(_PIECE):
                found += piece
                self._limit(deadline)  # a byte now and then is no better than silence
            if answer.length:  # read1 takes a lost connection for the end
                raise http.client.IncompleteRead(bytes(found), answer.length)
        if answer.status != 200:
            raise ValueError(f"status {answer.status} {answer.reason}: {bytes(found[:200])!r}")
        return bytes(found)

    def _request(self, body: bytes, deadline: float) -> http.client.HTTPResponse:
        """Sends the request; on a kept connection that the server has closed meanwhile, once more."""
        kept = self._connection.sock is not None
        try:
            return self._send(body, deadline)
        except (ConnectionError, http.client.BadStatusLine):
            self._connection.close()
            if not kept:
                raise
        return self._send(body, deadline)

    def _send(self, body: bytes, deadline: float) -> http.client.HTTPResponse:
        self._limit(deadline)
        self._connection.request("POST", self._target, body, {"Content-Type": "application/json"})
        self._limit(deadline)
        return self._connection.getresponse()

    def _limit(self, deadline: float) -> None:
        """Leaves the next operation on the connection no more than the time that is left."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole answer within {self._timeout_s} s")
        self._connection.timeout = left
        if self._connection.sock:
            self._connection.sock.settimeout(left)


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in _CONNECTIONS and parts.hostname and parts.port != 0  # .port may raise
    except ValueError:
        good = False
    if not good:
        raise Refusal(f"retrieval.url is {url!r}, expected an address like http://10.0.0.2:8000/retrieve.")
    return parts


def _documents(body: bytes, count: int, k: int) -> list[tuple[Document, ...]]:
    """Reads an answer; a ValueError says what is wrong with it."""
    answer = parse_json(body)
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list) or len(result) != count:
        raise ValueError(f'found {_short(answer)}, expected {{"result": [{count} lists]}}')
    return [_hits(hits, k) for hits in result]


def _hits(hits: Any, k: int) -> tuple[Document, ...]:
    if not isinstance(hits, list) or len(hits) > k:
        raise ValueError(f"found {_short(hits)} for one query, expected a list of at most {k} documents")
    documents = {}  # a FAISS index with fewer than k passages fills its answer with repetitions
    for document in map(_document, hits):
        documents.setdefault(document.id, document)
    return tuple(documents.values())


def _document(hit: Any) -> Document:
    found = hit.get("document", hit) if isinstance(hit, dict) else None
    if isinstance(found, dict):
        id_, contents, score = found.get("id"), found.get("contents"), hit.get("score")
        if isinstance(id_, str | int) and isinstance(contents, str) and contents.strip():
            return Document(str(id_), contents, score if isinstance(score, float | int) else None)
    raise ValueError(f'found {_short(hit)}, expected a document with "id" and "contents"')


def _short(value: Any) -> str:
    return f"{value!r:.120}"
