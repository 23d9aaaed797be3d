"""What a program looks for before its first phase: files, models, devices, search servers of all phases."""

import json
import socket

import jax
import pytest

from mopd_jax.checks import ConfigError
from mopd_jax.config import Backend, Config, Kind, Precision, phases
from mopd_jax.model import sharding
from mopd_jax.retrieval import bm25
from mopd_jax.retrieval.corpus import fingerprint
from mopd_jax.run import parts, preflight
from tests import tiny
from tests.test_bm25 import PASSAGES, write_corpus

DEVICES = len(jax.devices())


@pytest.fixture
def named(tmp_path) -> dict[str, Config]:
    """A chain of three phases on as many devices as there are."""
    chain = tiny.get_config()
    chain.run.dir = str(tmp_path / "run")
    for phase in (chain.start, chain.teacher, chain.team):
        phase.mesh.shape = (1, DEVICES, 1)
    return phases(chain)


def problems(named: dict[str, Config], kind: Kind | None = None) -> list[str]:
    with pytest.raises(ConfigError) as refusal:
        preflight.check(named, kind)
    title, *found = str(refusal.value).splitlines()
    assert title == "The config is refused:"
    return found


def test_earlier_phases_need_not_have_run(named):
    named["team"].model.teacher += "/export"
    preflight.check(named)


def test_what_later_phases_miss_is_found_at_once(named, tmp_path):
    named["start"].data.demonstrations = (str(tmp_path / "talks.jsonl"),)
    named["team"].data.train = (__file__, str(tmp_path / "nq.jsonl"))
    named["team"].retrieval.backend, named["team"].retrieval.corpus = Backend.BM25, str(tmp_path)
    named["team"].model.reference = str(tmp_path / "absent")
    named["team"].mesh.shape = (1, DEVICES, 2)
    named["team"].mesh.rollout_tensor = DEVICES + 1
    talks, questions, corpus, reference, mesh, tensor = problems(named)
    missing = str(tmp_path / "talks.jsonl")
    assert talks == f"- config.start.data.demonstrations = ('{missing}',): found no file {missing}."
    assert questions.startswith("- config.team.data.train = (")
    assert questions.endswith(f"found no file {tmp_path}/nq.jsonl.")
    assert corpus == f"- config.team.retrieval.corpus = '{tmp_path}': found no file {tmp_path}."
    assert reference.startswith(f"- config.team.model.reference = '{tmp_path}/absent': ")
    assert "neither a Hugging Face folder (no config.json) nor a run" in reference
    assert f"team.mesh.shape = (1, {DEVICES}, 2): takes {2 * DEVICES} devices, found {DEVICES}" in mesh
    assert tensor.endswith(f"= {DEVICES + 1}: must divide the devices of a process, here {DEVICES}.")


def test_a_teacher_that_does_not_fit_is_found_at_once_unless_it_is_yet_to_be_made(named, tmp_path):
    """Kind 20."""
    phase, base, other = named["team"], tmp_path / "base", tmp_path / "other"
    student = parts.open_model("random", named["start"])
    params = parts.load_params(student, sharding.make_mesh((1, DEVICES, 1)), Precision.FLOAT32, seed=0)
    for folder in (base, other):
        parts.export(folder, student, params, phase.team)
    stops = json.loads((other / "generation_config.json").read_text())
    stops["eos_token_id"] = [stops["eos_token_id"], stops["pad_token_id"]]
    (other / "generation_config.json").write_text(json.dumps(stops))
    phase.model.init, phase.model.reference = str(base), str(base)
    preflight.check(named)
    phase.model.teacher = str(other)
    (teacher,) = problems(named)
    assert teacher.startswith(
        f"- config.team.model.teacher = '{other}': Student and teacher differ in eos_ids"
    )
    named["teacher"].run.dir = str(other)
    preflight.check(named)
    phase.model.searcher = str(other)
    (searcher,) = problems({"": phase}, Kind.EVALUATE)
    assert searcher.startswith(f"- config.model.searcher = '{other}': Student and Searcher differ in eos_ids")


def test_an_index_of_another_corpus_is_found_at_once(named, tmp_path):
    corpora = [write_corpus(tmp_path / f"{count}.jsonl", PASSAGES[:count]) for count in (2, 3)]
    bm25.build(corpora[0], str(tmp_path / "index"))
    retrieval = named["team"].retrieval
    retrieval.backend, retrieval.corpus = Backend.BM25, corpora[0]
    retrieval.index = str(tmp_path / "index")
    preflight.check(named)
    retrieval.corpus = corpora[1]
    (found,) = problems(named)
    assert found.startswith(f"- config.team.retrieval.index = '{tmp_path}/index': ")
    assert f"made from another corpus: its fingerprint is {fingerprint(corpora[0])}" in found
    retrieval.index = str(tmp_path)
    assert problems(named)[0].endswith(f"found no file {tmp_path}/index.json.")


def test_an_evaluation_needs_its_own_inputs_only(named, tmp_path):
    phase = named["team"]
    phase.data.train, phase.model.teacher, phase.mesh.shape = ("nq.jsonl",), "absent", (1, 1, 999)
    phase.model.init = "random"
    preflight.check({"": phase}, Kind.EVALUATE)
    phase.data.test, phase.model.init = (str(tmp_path / "test.jsonl"),), str(tmp_path)
    phase.model.searcher = str(tmp_path / "absent")
    test, init, searcher = problems({"": phase}, Kind.EVALUATE)
    assert test.startswith("- config.data.test = (") and init.startswith("- config.model.init = ")
    assert searcher.startswith(f"- config.model.searcher = '{tmp_path}/absent': ")
    assert "neither a Hugging Face folder (no config.json) nor a run" in searcher


def test_a_prepared_set_and_a_manifest_must_be_there(named, tmp_path):
    phase = named["team"]
    phase.model.init, phase.data.test = "random", (f"{tmp_path}/nq:test",)
    phase.data.manifest = str(tmp_path / "manifest.jsonl")
    test, manifest = problems({"": phase}, Kind.EVALUATE)
    assert test.endswith(f"found no file {tmp_path}/nq:test.")
    assert manifest.endswith(f"found no file {tmp_path}/manifest.jsonl.")
    (tmp_path / "manifest.jsonl").touch()
    (tmp_path / "nq" / "1.0.0").mkdir(parents=True)
    (tmp_path / "nq" / "1.0.0" / "questions-test.array_record-00000-of-00001").touch()
    preflight.check({"": phase}, Kind.EVALUATE)


def test_a_search_server_that_is_not_there_is_noticed_and_asked_once(named):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/retrieve"
    retrieval = named["team"].retrieval
    retrieval.backend, retrieval.url, retrieval.retries = Backend.HTTP, url, 0
    (server,) = problems(named | {"again": named["team"]})
    assert server.startswith(f"- config.team.retrieval.url = '{url}': {url} failed 1 times, at last with")


def test_a_port_that_there_is_not_is_refused(named):
    named["team"].retrieval.backend, named["team"].retrieval.url = Backend.HTTP, "http://host:99999/retrieve"
    (server,) = problems(named)
    assert "expected an address like http://10.0.0.2:8000/retrieve" in server
