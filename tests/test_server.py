"""The search server over real backends, asked by our client and by raw requests."""

import http.client
import json
import re
import subprocess
import sys
import threading

import pytest

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.bm25 import BM25Search
from mopd_jax.retrieval.http import HTTPSearch
from mopd_jax.retrieval.search import SearchError
from mopd_jax.retrieval.server import LONGEST_BODY, SearchServer
from tests.test_bm25 import PASSAGES, write_corpus
from tools import build_index, serve_retriever

QUERIES = ["capital of Norway", "flowing rivers", "inlet"]


@pytest.fixture(scope="module")
def bm25(tmp_path_factory):
    return BM25Search(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", PASSAGES))


@pytest.fixture(scope="module")
def server(bm25):
    yield from running(bm25)


def running(retriever):
    with SearchServer(retriever, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def address(server) -> str:
    return f"http://127.0.0.1:{server.server_port}/retrieve"


def post(server, body: bytes, path: str = "/retrieve") -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", path, body)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_client_gets_what_the_backend_finds(server, bm25, count):
    found = HTTPSearch(address(server)).search(QUERIES[:count], 2)
    expected = bm25.search(QUERIES[:count], 2)
    assert found == expected and len(found) == count
    assert [[d.score for d in hits] for hits in found] == [[d.score for d in hits] for hits in expected]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_scores_on_and_off_give_the_same_documents_as_many_as_queries(server, count):
    request = {"queries": QUERIES[:count], "topk": 3}
    status, bare = post(server, json.dumps(request).encode())
    _, scored = post(server, json.dumps(request | {"return_scores": True}).encode())
    assert status == 200 and len(bare["result"]) == count
    assert bare["result"] == [[hit["document"] for hit in hits] for hits in scored["result"]]
    assert bare["result"][0][0] == {"id": "a", "contents": PASSAGES[0][1]}
    assert all(hits == sorted(hits, key=lambda hit: -hit["score"]) for hits in scored["result"])


@pytest.mark.parametrize("body", [b'{"queries": ["Tiber"]}', b'{"queries": ["Tiber"], "topk": null}'])
def test_topk_is_three_where_it_is_absent_or_null(server, body):
    _, answer = post(server, body)
    assert len(answer["result"][0]) == 3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"queries": ["x"]', "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "found a JSON list, expected an object"),
        (b"{}", "found queries = None, expected a list of texts"),
        (b'{"queries": "x"}', "found queries = 'x'"),
        (b'{"queries": ["x", 1]}', "expected a list of texts"),
        (b'{"queries": ["x"], "topk": 0}', "found topk = 0, expected a whole number from 1 to 1000"),
        (b'{"queries": ["x"], "topk": true}', "found topk = True"),
        (b'{"queries": ["x"], "topk": 1001}', "found topk = 1001"),
        (b'{"queries": ["x"], "return_scores": 1}', "found return_scores = 1, expected true or false"),
    ],
)
def test_a_bad_request_is_refused_in_words_and_the_server_goes_on(server, body, words):
    status, answer = post(server, body)
    assert status == 400 and words in answer["detail"]
    assert post(server, b'{"queries": ["Oslo"], "topk": 1}')[1]["result"][0][0]["id"] == "a"


def test_other_paths_and_bodies_too_large_are_refused_unread(server):
    assert post(server, b"{}", "/search") == (404, {"detail": "found path /search, expected /retrieve"})
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest("POST", "/retrieve")
    connection.putheader("Content-Length", str(LONGEST_BODY + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, answer.will_close) == (413, True)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest("POST", "/retrieve")
    connection.endheaders()
    assert connection.getresponse().status == 411


class Failing:
    """A backend that has lost its index."""

    identity = "failing"

    def search(self, queries, k):
        raise OSError("the disk is gone")


def test_a_backend_that_fails_is_a_fault_of_the_server_never_a_blank_answer():
    for server in running(Failing()):
        assert post(server, b'{"queries": ["x"]}') == (500, {"detail": "OSError: the disk is gone"})
        client = HTTPSearch(address(server), retries=1, sleep=lambda _: None)
        with pytest.raises(SearchError, match=r"failed 2 times.*status 500.*the disk is gone"):
            client.search(["x"], 3)


def test_many_clients_at_once_each_get_their_own_answer(server):
    found = {}

    def ask(number: int):
        client = HTTPSearch(address(server))
        found[number] = [client.search([QUERIES[number % 3]], 1)[0][0].id for _ in range(5)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: ["acd"[number % 3]] * 5 for number in range(9)}


def test_the_command_serves_an_index_on_the_loopback(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", PASSAGES)
    build_index.main(["--corpus", corpus, "--out", str(tmp_path / "index")])
    command = [sys.executable, "-m", "tools.serve_retriever", "--corpus", corpus, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--index", str(tmp_path / "index")], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        url = re.fullmatch(r"bm25:[0-9a-f]{16} answers at (http://127\.0\.0\.1:\d+/retrieve)\n", line)[1]
        assert HTTPSearch(url).search(["Oslo"], 1)[0][0].id == "a"
    finally:
        process.kill()
        process.communicate()


def serve(host: str, port: int, *flags: str) -> None:
    """Calls the command on files that are not there: what is refused is refused before they are opened."""
    address = ["--host", host, "--port", str(port)]
    serve_retriever.main(["--corpus", "absent.jsonl", "--index", "absent", *address, *flags])


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 65536), ("192.0.2.1", 8000), ("no.host.invalid", 8000)]
)
def test_an_address_that_is_none_of_this_machine_is_refused(host, port):
    words = (
        rf"^Cannot listen at {re.escape(host)}:{port} \(.+\): choose another --port, or an address of this"
    )
    with pytest.raises(Refusal, match=words):
        serve(host, port)


def test_a_port_in_use_is_refused(server):
    port = server.server_port
    with pytest.raises(Refusal, match=rf"^Cannot listen at 127\.0\.0\.1:{port} \(.*already in use\): choose"):
        serve("127.0.0.1", port)


def test_a_cache_of_fewer_than_no_queries_is_refused(capsys):
    with pytest.raises(SystemExit):
        serve("127.0.0.1", 0, "--cache", "-1")
    assert "--cache: found -1, expected a number from 0 on" in capsys.readouterr().err
