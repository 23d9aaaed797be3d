"""Several processes as one run: two of two devices do what one of four does, stop and fail together."""

import http.server
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from mopd_jax import flags
from mopd_jax.checks import ConfigError
from mopd_jax.config import Precision
from mopd_jax.model import sharding
from mopd_jax.run import hosts, parts
from tests import host_program
from tests.fixtures import read_metrics
from tests.test_train import ROOT, measured, wait_for_lines
from tests.tiny_hosts import get_config

FLAGS = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])


STARTED: list[subprocess.Popen] = []


@pytest.fixture(scope="module", autouse=True)
def nothing_left():
    """A test that failed does not leave its processes running."""
    yield
    for process in STARTED:
        process.kill()


def start(module: str, *arguments: str, devices: int) -> subprocess.Popen:
    count = f"--xla_force_host_platform_device_count={devices}"
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": f"{FLAGS} {count}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def meeting_point() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start_two(module: str, *arguments: str) -> list[subprocess.Popen]:
    """Starts a program of this package as two processes of two devices each."""
    where = f"--coordinator={meeting_point()}", "--processes=2"
    return [start(module, *arguments, *where, f"--process={i}", devices=2) for i in range(2)]


# A line made of the pieces that Gloo's threads print, at times into each other's lines.
GLOO = re.compile(
    r"^(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |"
    r"Expected number of connected peer ranks is : )*\n",
    re.MULTILINE,
)


def speech(process: subprocess.Popen) -> tuple[str, str]:
    """Waits for the end; returns what the program said to stdout (less what Gloo says there) and stderr."""
    output, errors = process.communicate(timeout=1800)
    return GLOO.sub("", output), errors


# ---------------------------------------------------------------- what processes do together


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What `host_program` finds in one process, and in each of two."""
    folder, where = tmp_path_factory.mktemp("found"), meeting_point()
    running = {
        name: start("tests.host_program", f"{folder}/{name}", where, "2", str(i), devices=2)
        for i, name in enumerate(("first", "second"))
    }
    found = {"one": json.loads(json.dumps(host_program.findings(folder)))}
    for name, process in running.items():
        output, errors = speech(process)
        assert process.returncode == 0, errors
        found[name] = json.loads((folder / name).read_text()) | {"output": output}
    return found


def test_two_processes_on_replayed_episodes_have_the_losses_of_one(found):
    """Kind 30."""
    for run in ("equal", "one_idle"):
        expected = found["one"][run]["lines"]
        assert len({line["loss"] for line in expected}) == 3
        assert all(line["grad_norm"] > 0.01 for line in expected)
        for process in ("first", "second"):
            for line, wanted in zip(found[process][run]["lines"], expected, strict=True):
                assert line["episodes_crc32"] == wanted["episodes_crc32"]
                assert line == pytest.approx(wanted, rel=1e-5, abs=1e-9, nan_ok=True)


def test_each_process_samples_its_questions_only(found):
    played = {name: (f["equal"]["played"], f["one_idle"]["played"]) for name, f in found.items()}
    assert played == {
        "one": ([8, 8, 8], [2, 2, 2]),
        "first": ([4, 4, 4], [2, 2, 2]),
        "second": ([4, 4, 4], [0, 0, 0]),
    }


def test_weights_are_handed_over_whole_whatever_the_order_of_devices(found):
    assert all(len(f["hand_over"]) == 14 and all(f["hand_over"]) for f in found.values())


def test_values_are_gathered_in_order(found):
    gathered = [{"process": 0, "long": ""}, {"process": 1, "long": "x" * 1000}]
    assert [f["gathered"] for f in found.values()] == [gathered[:1], gathered, gathered]
    assert [f["first"] for f in found.values()] == ["of 0"] * 3
    assert [f["any"] for f in found.values()] == [[False, True, True]] * 3


def test_spread_work_comes_back_in_the_order_of_one_process(found):
    owners = [0, 0, 1, 1, 0, 0, 1]
    expected = [f"{i**2} by {owner}" for i, owner in enumerate(owners)]
    assert found["first"]["spread"] == found["second"]["spread"] == expected
    assert found["one"]["spread"] == [f"{i**2} by 0" for i in range(7)]
    assert [f["no_items"] for f in found.values()] == [[]] * 3


def test_what_fails_on_one_process_fails_on_all(found):
    assert found["second"]["failed"] == "KeyError: 'no corpus'"
    assert found["first"]["failed"] == (
        "HostError: Process 1 failed, its own log says where: KeyError: 'no corpus'"
    )


def test_processes_with_other_settings_are_refused_and_named(found):
    assert found["one"]["disagreed"] == ""
    expected = "HostError: Process 1 was started with other settings or files than process 0:"
    for process in ("first", "second"):
        assert found[process]["disagreed"] == f"{expected}\n- config.lr: 0 → 1"


def test_a_folder_that_is_not_shared_is_refused(found):
    assert [f["shared"] for f in found.values()] == [""] * 3
    for process in ("first", "second"):
        assert re.match(
            r"HostError: Processes \[1\] do not find .* run\.dir = .*: take", found[process]["not_shared"]
        )


def test_the_first_process_speaks_for_all(found):
    assert found["first"]["output"] == "process 0 speaks\n"
    assert found["second"]["output"] == ""


# ---------------------------------------------------------------- the training program


def stop_one_of_two(folder: pathlib.Path, config: str) -> tuple[int, str]:
    """Starts a training in two processes and sends SIGTERM to the second; returns the step after which both
    have stopped, and the output of one process that takes the run to its end."""
    arguments = config, f"--config.run.dir={folder}"
    two = start_two("mopd_jax.train", *arguments)
    wait_for_lines(folder, 1, two[0], seconds=900)
    two[1].send_signal(signal.SIGTERM)
    (output, errors), (silence, others) = map(speech, two)
    assert [process.returncode for process in two] == [143, 143], errors + others
    assert silence == "" and "SIGTERM received" in others and "SIGTERM" not in errors
    step = int(re.search(r"Stopped after step (\d+) of", output)[1])
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, step + 1))
    goes_on = start("mopd_jax.train", *arguments, devices=4)
    output, errors = speech(goes_on)
    assert goes_on.returncode == 0, errors
    return step, output


def test_one_signal_stops_both_and_one_process_goes_on(tmp_path):
    step, output = stop_one_of_two(tmp_path, "--config=tests/tiny_hosts.py")
    assert f"Continuing {tmp_path} after step {step}.\n" in output
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["nll"] < lines[0]["nll"] - 0.5
    assert (tmp_path / "export" / "model.safetensors").exists() and (tmp_path / "finished.json").exists()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """The config of the tiny team with its teacher: other random weights."""
    folder = tmp_path_factory.mktemp("teacher")
    config = get_config()
    config.run.dir = str(folder / "run")
    opened = parts.open_model("random", config)
    params = parts.load_params(opened, sharding.local_mesh(1), Precision.FLOAT32, seed=1)
    parts.export(folder / "teacher", opened, params, config.team)
    return f"--config=tests/tiny_hosts.py:{folder}/teacher"


@pytest.mark.slow
def test_a_distilled_team_trains_in_two_processes_as_in_one(teacher, tmp_path):
    alone = start("mopd_jax.train", teacher, f"--config.run.dir={tmp_path}/one", devices=4)
    step, output = stop_one_of_two(tmp_path / "two", teacher)
    assert speech(alone) and alone.returncode == 0
    assert f"after step {step}.\n" in output
    found, expected = measured(tmp_path / "two"), measured(tmp_path / "one")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert found[0]["episodes_crc32"] == expected[0]["episodes_crc32"], "both sample the same from the seed"
    assert found[0]["engine/decoded"] == expected[0]["engine/decoded"], "of both engines"
    same = [{k: v for k, v in lines[0].items() if not k.startswith("engine")} for lines in (found, expected)]
    assert same[0] == pytest.approx(same[1], rel=1e-5, abs=1e-7)
    assert {"eval/em", "eval/recall"} <= found[1].keys() & found[5].keys()
    assert all(line["grad_norm"] > 0 for line in found)
    best = json.loads((tmp_path / "two" / "best.json").read_text())
    assert best["step"] in (2, 4, 6) and (tmp_path / "two" / "export" / "model.safetensors").exists()


@pytest.mark.slow
def test_two_processes_run_the_whole_chain(tmp_path):
    """configs/mini.py cut down: imitation, both stages, four evaluations, one report by the first process."""
    phases = ("facts", "warmup", "stage1", "stage2")
    overrides = [f"--config.{phase}.train.steps=2" for phase in phases]
    overrides += [f"--config.{phase}.train.questions=3" for phase in phases]
    for phase in ("base_c_mas", "base_h_mas", "stage1_c_mas", "stage2_h_mas"):
        overrides += [f"--config.{phase}.eval.questions=3", f"--config.{phase}.eval.attempts=2"]
        phases += (phase,)
    overrides += [f"--config.{phase}.mesh.shape=(1,4,1)" for phase in phases]
    arguments = "--config=configs/mini.py", *overrides
    two = start_two("mopd_jax.train", *arguments, f"--config.run.dir={tmp_path}/two")
    one = start("mopd_jax.train", *arguments, f"--config.run.dir={tmp_path}/one", devices=4)
    (output, errors), (silence, others), _ = map(speech, (*two, one))
    assert [process.returncode for process in (*two, one)] == [0, 0, 0], errors + others
    assert silence == "" and (tmp_path / "two" / "report.md").read_text().partition("\n\n##")[0] in output
    for phase in ("facts", "warmup", "stage1", "stage2"):
        losses = [[line["loss"] for line in read_metrics(tmp_path / run / phase)] for run in ("two", "one")]
        assert len(losses[0]) == 2
        if phase in ("facts", "warmup"):
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name in ("results.jsonl", "episodes.jsonl"):
        lines = (tmp_path / "two" / "stage2_h_mas" / name).read_text().splitlines()
        assert len(lines) == 3 * 2 + (name == "results.jsonl")


@pytest.mark.slow
def test_a_killed_process_takes_the_other_with_it(tmp_path):
    config = "--config=tests/tiny_hosts.py"
    two = start_two("mopd_jax.train", config, f"--config.run.dir={tmp_path}", "--config.train.steps=9999")
    wait_for_lines(tmp_path, 1, two[0], seconds=900)
    two[1].kill()
    began = time.monotonic()
    two[0].communicate(timeout=200)
    assert two[0].returncode != 0 and time.monotonic() - began < 180


# ---------------------------------------------------------------- which process is which


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--processes=2"], "needs all three"),
        (["--coordinator=host:1"], "needs all three"),
        (["--process=1"], "needs all three"),
        (["--coordinator=host:1", "--processes=2", "--process=2"], "between 0 and 1"),
        (["--coordinator=host:1", "--processes=2", "--process=-1"], "between 0 and 1"),
        (["--coordinator=host", "--processes=2"], "HOST:PORT"),
    ],
)
def test_flags_that_describe_no_process_are_refused(arguments, reason):
    with pytest.raises(ConfigError, match=reason) as refusal:
        parsed(*arguments)
    assert all(argument in str(refusal.value) for argument in arguments)


def test_flags_name_a_process():
    assert parsed() == flags.ALONE
    assert parsed("--coordinator=10.0.0.2:8476", "--processes=16", "--process=15") == (
        "10.0.0.2:8476",
        16,
        15,
    )


def parsed(*arguments: str) -> flags.Hosts:
    values = flags.absl.flags.FlagValues()
    argv = ["train", f"--config={ROOT}/configs/mini.py", *arguments]
    flags.define_config(values, argv)
    where = flags.define_hosts(values)
    flags._parse(argv, None, values)
    return where()


@pytest.fixture
def tpu_machine(monkeypatch):
    """JAX's configuration on a machine with TPU chips, and an environment that says nothing of others."""
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "tpu,cpu")
    yield
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    "environment, expected",
    [
        ({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, 4),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1", "TPU_WORKER_HOSTNAMES": "a"}, 2),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, 1),
        ({"TPU_SKIP_MDS_QUERY": "1"}, 1),
    ],
)
def test_a_pod_is_told_from_a_single_host(environment, expected, tpu_machine, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hosts.tpu_hosts() == expected


def test_a_machine_without_tpu_is_no_pod(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    assert hosts.tpu_hosts() == 1


class _Metadata(http.server.BaseHTTPRequestHandler):
    """Answers as the metadata server of a TPU VM with two hosts does."""

    def do_GET(self):
        known = self.path == "/worker-network-endpoints" and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(b"unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3")

    def log_message(self, *args):
        pass


def test_the_metadata_server_counts_the_hosts_of_a_slice(tpu_machine, monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), _Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(hosts, "_METADATA", address)
        assert hosts.tpu_hosts() == 2
        monkeypatch.setattr(hosts, "_METADATA", address + "no/such/")
        assert hosts.tpu_hosts() == 1
        server.shutdown()
    assert hosts.tpu_hosts() == 1, "nobody answers"


# ---------------------------------------------------------------- one process


def test_one_process_is_left_as_it_is():
    value, items = object(), [object(), object()]
    assert hosts.gather(value)[0] is value
    assert hosts.spread(lambda mine: mine, items, together=1) == items
    assert hosts.is_first() and not hosts.any_of(False)
    with pytest.raises(ZeroDivisionError):
        hosts.spread(lambda _: 1 / 0, items, together=1)


@pytest.mark.parametrize("tensor", [1, 2])
def test_weights_of_one_process_reach_its_engine(tensor):
    mesh, local = sharding.make_mesh((2, 2, 2)), sharding.local_mesh(tensor)
    x = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    spec = jax.sharding.PartitionSpec("tensor", "fsdp")
    there = jax.sharding.NamedSharding(local, spec)
    found = sharding.hand_over({"x": sharding.place(x, jax.sharding.NamedSharding(mesh, spec))}, {"x": there})
    np.testing.assert_array_equal(found["x"], x)
    assert found["x"].sharding == there and len(found["x"].addressable_shards) == tensor
