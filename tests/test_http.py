"""The HTTP client against a real server on this machine: both answer spellings, faults, retries."""

import http.server
import json
import re
import socket
import threading
import time

import pytest

from mopd_jax.retrieval.http import HTTPSearch
from mopd_jax.retrieval.search import Document, SearchError

CORPUS = [{"id": str(i), "contents": f'"Title {i}"\ntext {i}'} for i in range(9)]


def answer(request: dict, scores: bool = True) -> bytes:
    """A right answer: query "n" finds the passages n, n + 1, …"""
    hits = [[CORPUS[(int(q) + i) % 9] for i in range(request["topk"])] for q in request["queries"]]
    if scores:
        hits = [[{"document": d, "score": 1 / (1 + i)} for i, d in enumerate(ds)] for ds in hits]
    return json.dumps({"result": hits}).encode()


class Server:
    """A server on the loopback that answers requests by a script, then rightly for ever."""

    def __init__(self, protocol: str = "HTTP/1.0"):
        self.script, self.requests, self.scores, self.connections = [], [], True, 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = protocol

            def setup(self):
                outer.connections += 1
                super().setup()

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(request)
                reply = outer.script.pop(0) if outer.script else None
                outer.reply(self, reply or (200, answer(request, outer.scores)))

            def log_message(self, *args):
                pass

        self._httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._httpd.daemon_threads = True  # a kept connection outlives its requests
        self.url = f"http://127.0.0.1:{self._httpd.server_port}/retrieve"
        self._thread = threading.Thread(target=self._httpd.serve_forever, args=(0.01,))
        self._thread.start()

    def reply(self, handler, reply):
        if callable(reply):
            return reply(handler)
        status, body = reply
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def close(self):
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.close()


@pytest.fixture
def keeping():
    """A server that keeps connections."""
    running = Server("HTTP/1.1")
    yield running
    running.close()


@pytest.fixture
def waits():
    return []


@pytest.fixture
def client(server, waits):
    return HTTPSearch(server.url, timeout_s=5, retries=2, sleep=waits.append)


def ids(results):
    return [[document.id for document in documents] for documents in results]


@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("queries", [["4"], ["4", "0"], ["4", "0", "7"]])
def test_as_many_lists_as_queries_and_the_same_documents_with_and_without_scores(
    server, client, queries, scores
):
    server.scores = scores
    expected = {"4": ["4", "5", "6"], "0": ["0", "1", "2"], "7": ["7", "8", "0"]}
    found = client.search(queries, 3)
    assert ids(found) == [expected[q] for q in queries]
    assert found[0][0] == Document("4", '"Title 4"\ntext 4')
    assert [d.score for d in found[0]] == ([1, 1 / 2, 1 / 3] if scores else [None] * 3)
    assert server.requests == [{"queries": queries, "topk": 3, "return_scores": True}]


def test_two_passages_and_k_three_give_two_documents_none_repeated(server, client):
    two = [CORPUS[0], CORPUS[1]]
    server.script = [
        (200, json.dumps({"result": [two]}).encode()),
        (200, json.dumps({"result": [[*two, CORPUS[0]]]}).encode()),
    ]
    assert ids(client.search(["x"], 3)) == ids(client.search(["x"], 3)) == [["0", "1"]]


def test_an_empty_list_is_an_answer_and_numbers_are_ids(server, client):
    hits = [[], [{"document": {"id": 7, "contents": "t"}, "score": 0.5}]]
    server.script = [(200, json.dumps({"result": hits}).encode())]
    assert client.search(["a", "b"], 3) == [(), (Document("7", "t"),)]


def test_half_a_surrogate_pair_in_an_answer_becomes_a_question_mark(server, client):
    server.script = [(200, rb'{"result": [[{"id": "1", "contents": "a\ud800b"}]]}')]
    assert client.search(["x"], 3) == [(Document("1", "a?b"),)]


def test_queries_are_split_at_the_largest_batch_and_none_send_nothing(server):
    client = HTTPSearch(server.url, max_batch=2)
    queries = [str(i) for i in range(5)]
    assert ids(client.search(queries, 1)) == [[q] for q in queries]
    assert [r["queries"] for r in server.requests] == [["0", "1"], ["2", "3"], ["4"]]
    assert client.search([], 3) == [] and len(server.requests) == 3


def half_a_body(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"result": [[')
    handler.close_connection = True


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def well_formed(result) -> tuple[int, bytes]:
    return 200, json.dumps({"result": result}).encode()


FAULTS = {
    "500": (500, b"oops"),
    "404": (404, b""),
    "half a body": half_a_body,
    "hang up": hang_up,
    "no JSON": (200, b"<html>"),
    "nested without end": (200, b"[" * 200_000),
    "another address": (302, b""),
    "no UTF-8": (200, b'{"result": [["\xff"]]}'),
    "empty body": (200, b""),
    "no result": (200, b'{"results": [[]]}'),
    "a list": (200, b"[[]]"),
    "too few lists": well_formed([]),
    "too many lists": well_formed([[], []]),
    "no list": well_formed([None]),
    "too many documents": well_formed([CORPUS[:4]]),
    "no contents": well_formed([[{"id": "1"}]]),
    "blank contents": well_formed([[{"id": "1", "contents": " "}]]),
    "no id": well_formed([[{"document": {"contents": "t"}}]]),
    "no document": well_formed([["text"]]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_two_faults_then_an_answer_take_three_requests_and_growing_waits(server, client, waits, fault):
    server.script = [fault, fault]
    assert ids(client.search(["3"], 3)) == [["3", "4", "5"]]
    assert len(server.requests) == 3
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_that_stays_is_a_search_error_never_a_blank_result(server, client, fault):
    server.script = [fault] * 3
    with pytest.raises(SearchError, match=re.escape(server.url) + " failed 3 times, at last with"):
        client.search(["3"], 3)
    assert len(server.requests) == 3


def test_a_server_that_does_not_answer_in_time_is_asked_again(server, waits):
    client = HTTPSearch(server.url, timeout_s=0.2, retries=1, sleep=waits.append)
    server.script = [lambda handler: time.sleep(0.6)]
    assert ids(client.search(["1"], 1)) == [["1"]]
    assert (len(server.requests), waits) == (2, [0.5])


def test_an_answer_that_trickles_in_is_given_up_in_time(server, waits):
    def trickle(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    client = HTTPSearch(server.url, timeout_s=0.3, retries=1, sleep=waits.append)
    server.script = [trickle]
    start = time.monotonic()
    assert ids(client.search(["1"], 1)) == [["1"]]
    assert (len(server.requests), waits) == (2, [0.5])
    assert time.monotonic() - start < 1.9  # the trickle alone takes two seconds


def test_one_connection_serves_all_requests(keeping, waits):
    client = HTTPSearch(keeping.url, max_batch=2, sleep=waits.append)
    for _ in range(3):
        assert ids(client.search(["1", "2", "3"], 1)) == [["1"], ["2"], ["3"]]
    assert (len(keeping.requests), keeping.connections, waits) == (6, 1, [])


def test_a_connection_that_the_server_has_closed_meanwhile_is_no_fault(keeping, waits):
    client = HTTPSearch(keeping.url, retries=0, sleep=waits.append)

    def answer_and_leave(handler):
        keeping.reply(handler, (200, answer(keeping.requests[-1])))
        handler.close_connection = True

    keeping.script = [answer_and_leave]
    assert ids(client.search(["1"], 1)) == [["1"]]
    assert ids(client.search(["2"], 1)) == [["2"]]
    assert (len(keeping.requests), keeping.connections, waits) == (2, 2, [])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_after_a_fault_the_next_request_has_a_connection_of_its_own(keeping, waits, fault):
    """What is left of a broken answer is never read as the next one."""
    client = HTTPSearch(keeping.url, timeout_s=5, retries=1, sleep=waits.append)
    assert ids(client.search(["7"], 1)) == [["7"]]
    keeping.script = [fault]
    assert ids(client.search(["3"], 1)) == [["3"]]
    assert ids(client.search(["5"], 1)) == [["5"]]
    assert keeping.connections == 2


def test_no_server_is_a_search_error_after_bounded_waits(server, waits):
    server.close()
    client = HTTPSearch(server.url, retries=8, sleep=waits.append)
    with pytest.raises(SearchError, match=r"failed 9 times.*refused"):
        client.search(["1"], 1)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_identity_is_the_address_and_other_addresses_are_refused():
    assert HTTPSearch("http://host:8000/retrieve").identity == "http:http://host:8000/retrieve"
    for url in (
        "",
        "host:8000/retrieve",
        "file:///etc/passwd",
        "http:///retrieve",
        "http://host:99999/retrieve",
        "http://host:port/retrieve",
        "http://host:0/retrieve",
        "http://[::1/retrieve",
    ):
        with pytest.raises(ValueError, match="expected an address like http://10"):
            HTTPSearch(url)
