"""Checkpoints: what comes back, from which step, onto which devices; what a restart may change."""

import os
import pathlib
import shutil
import signal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mopd_jax.config import Chain, Config, Objective
from mopd_jax.run import checkpoint
from mopd_jax.run.checkpoint import CheckpointError, Checkpoints, ResumeError


@flax.struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def make_state(seed: int, devices: int = 8, impl: str = "threefry2x32", width: int = 4) -> State:
    """A train state on a mesh: a sharded matrix, a bf16 vector, masked AdamW and a typed key."""
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    params = {
        "w": jnp.arange(16.0 * width).reshape(16, width) + seed,
        "b": jnp.full(8, seed + 0.5, jnp.bfloat16),
    }
    optimizer = optax.adamw(1e-3, mask={"w": True, "b": False})
    state = State(jnp.int32(seed), params, optimizer.init(params), jax.random.key(seed, impl=impl))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, rows if x.ndim else whole), state)


def plain(state: State) -> list:
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(state)
    ]


def assert_equal(found: State, wanted: State) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(plain(found), plain(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory) -> pathlib.Path:
    """A run with steps 1 and 2; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    store = Checkpoints(folder, keep=2)
    for step in (1, 2):
        store.save(step, make_state(step), {"position": 10 * step})
    store.close()
    return folder


@pytest.fixture
def folder(saved_folder, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved_folder, tmp_path / "checkpoints")


@pytest.fixture
def open_store(folder):
    """Opens the copied run; closed at the end of the test."""
    opened = []

    def open_again(keep: int = 2) -> Checkpoints:
        opened.append(Checkpoints(folder, keep))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


# ---------------------------------------------------------------- saving and loading


def test_nothing_saved_is_none(tmp_path):
    store = Checkpoints(tmp_path / "new", keep=1)
    assert store.restore_latest(make_state(0)) is None
    assert store.steps() == []
    store.close()


def test_the_latest_step_comes_back_whole(open_store):
    restored = open_store().restore_latest(make_state(0))
    assert (restored.step, restored.meta) == (2, {"position": 20})
    assert_equal(restored.state, make_state(2))


def test_eight_devices_restore_on_four(open_store):
    """Kind 29."""
    wanted = make_state(0, devices=4)
    restored = open_store().restore_latest(wanted)
    assert_equal(restored.state, make_state(2))
    for found, like in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True):
        assert found.sharding.is_equivalent_to(like.sharding, found.ndim)
    assert len(restored.state.params["w"].addressable_shards) == 4


def test_a_restored_key_draws_the_same_numbers(open_store):
    restored = open_store().restore_latest(make_state(0))
    np.testing.assert_array_equal(
        jax.random.uniform(restored.state.key, 5), jax.random.uniform(jax.random.key(2), 5)
    )


def test_only_the_latest_are_kept(open_store):
    store = open_store(keep=2)
    store.save(5, make_state(5), {})
    store.wait()
    assert store.steps() == [2, 5]


def test_a_state_may_be_donated_once_it_is_being_saved(open_store):
    store = open_store()
    state = make_state(7)
    store.save(7, state, {})
    overwrite = jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)
    overwrite(state.params)
    store.wait()
    assert_equal(store.restore_latest(make_state(0)).state, make_state(7))


def test_a_step_is_saved_once(open_store):
    store = open_store()
    store.save(2, make_state(99), {"position": 99})
    store.wait()
    assert store.restore_latest(make_state(0)).meta == {"position": 20}


# ---------------------------------------------------------------- torn and foreign steps


def data_file(step: pathlib.Path) -> pathlib.Path:
    return next((step / "state" / "d").iterdir())


TEARS = {
    "truncated arrays": lambda step: os.truncate(data_file(step), 10),
    "no arrays": lambda step: data_file(step).unlink(),
    "truncated manifest": lambda step: os.truncate(step / "state" / "manifest.ocdbt", 50),
    "empty metadata": lambda step: os.truncate(step / "state" / "_METADATA", 0),
    "truncated json": lambda step: os.truncate(step / "meta" / "metadata", 4),
    "no json": lambda step: shutil.rmtree(step / "meta"),
    "no layout": lambda step: shutil.rmtree(step / "layout"),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "nothing but a folder": lambda step: (shutil.rmtree(step), step.mkdir()),
}


@pytest.mark.parametrize("tear", TEARS)
def test_a_torn_step_is_skipped_and_the_one_before_loads(folder, open_store, tear, caplog):
    """Kind 29."""
    TEARS[tear](folder / "2")
    store = open_store()
    restored = store.restore_latest(make_state(0))
    assert (restored.step, restored.meta) == (1, {"position": 10})
    assert_equal(restored.state, make_state(1))
    assert "Checkpoint 2 is torn and skipped" in caplog.text

    store.save(2, make_state(2), {"position": 22})  # the continued run comes to step 2 again
    store.wait()
    assert store.restore_latest(make_state(0)).meta == {"position": 22}
    assert (folder / "torn_2").is_dir()


def test_a_run_with_only_torn_steps_does_not_start_anew(folder, open_store):
    for step in ("1", "2"):
        os.truncate(folder / step / "meta" / "metadata", 0)
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* can be read:\n- step 2: .*\n- step 1: "):
        open_store().restore_latest(make_state(0))
    assert (folder / "1").is_dir()
    assert (folder / "2").is_dir()


def test_an_unfinished_save_is_no_step(folder, open_store):
    shutil.copytree(folder / "2", folder / "3.orbax-checkpoint-tmp-0")
    assert open_store().restore_latest(make_state(0)).step == 2


def test_another_random_generator_is_refused(open_store):
    with pytest.raises(CheckpointError, match=r"\.key: key<fry>\[\] → key<rbg>\[\]"):
        open_store().restore_latest(make_state(0, impl="rbg"))


def test_another_model_is_refused_with_the_arrays_named(open_store):
    with pytest.raises(CheckpointError) as refusal:
        open_store().restore_latest(make_state(0, width=5))
    assert "Checkpoint 2 does not fit this run, 3 arrays differ" in str(refusal.value)
    assert ".params['w']: float32[16, 4] → float32[16, 5]" in str(refusal.value)


# ---------------------------------------------------------------- what a restart may change


def test_config_to_dict_is_json_in_words():
    values = checkpoint.config_to_dict(Config())
    assert values["learn"]["searcher"] == "opd"
    assert values["learn"]["row_buckets"] == [1024, 2048, 4096, 8192]
    assert values["model"]["architecture"]["rope_theta"] == 100.0
    assert checkpoint.config_to_dict(Chain()) == {"run": values["run"]}


def test_config_diff_names_the_fields():
    old = checkpoint.config_to_dict(Config())
    config = Config()
    config.learn.beta, config.learn.searcher, config.mesh.shape = 1.0, Objective.GRPO, (1, 8, 1)
    new = checkpoint.config_to_dict(config)
    del old["eval"]["attempts"]
    assert checkpoint.config_diff(old, new) == [
        "mesh.shape: [1, 1, 1] → [1, 8, 1]",
        "learn.searcher: opd → grpo",
        "learn.beta: 0.01 → 1.0",
        "eval.attempts: absent → 4",
    ]
    assert checkpoint.config_diff(new, new) == []


def test_an_unchanged_run_continues():
    saved = checkpoint.resume_meta(Config(), {"nq.jsonl": "abc"})
    moved = Config()
    moved.run.dir, moved.checkpoint.every = "elsewhere", 7
    now = checkpoint.resume_meta(moved, {"nq.jsonl": "abc"})
    assert checkpoint.check_resume(saved, now, moved) is False


def test_changes_are_refused_unless_told(caplog):
    saved = checkpoint.resume_meta(Config(), {"nq.jsonl": "abc"})
    changed = Config()
    changed.optim.lr = 1e-3
    now = checkpoint.resume_meta(changed, {"nq.jsonl": "xyz"})
    with pytest.raises(ResumeError) as refusal:
        checkpoint.check_resume(saved, now, changed)
    assert "- optim.lr: 1e-06 → 0.001\n- nq.jsonl: abc → xyz\n" in str(refusal.value)
    assert "--config.run.allow_changes" in str(refusal.value)
    changed.run.allow_changes = True
    assert checkpoint.check_resume(saved, now, changed) is True
    assert "- optim.lr: 1e-06 → 0.001" in caplog.text


def test_a_folder_that_is_a_file_is_refused_before_any_work(tmp_path):
    checkpoint.check_writable(tmp_path / "new" / "run")
    assert not list((tmp_path / "new" / "run").iterdir())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"Nothing can be written to run\.dir = .*name another"):
        checkpoint.check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_json_files_are_replaced_whole(tmp_path):
    path = tmp_path / "new" / "best.json"
    assert checkpoint.read_json(path) is None
    checkpoint.write_json(path, {"step": 1, "em": 0.25})
    checkpoint.write_json(path, {"step": 2})
    assert checkpoint.read_json(path) == {"step": 2}
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoint.write_json(path, {"em": float("nan")})
    assert checkpoint.read_json(path) == {"step": 2}
    assert [p.name for p in path.parent.iterdir()] == ["best.json"]


# ---------------------------------------------------------------- stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_wish(number):
    before = signal.getsignal(number)
    with checkpoint.StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.signal == number.name
        assert signal.getsignal(number) is before  # a second one acts as ever
    assert signal.getsignal(number) is before


def test_handlers_are_back_after_a_quiet_block():
    before = signal.getsignal(signal.SIGTERM)
    with checkpoint.StopRequest() as stop:
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert not stop
