"""A phase without weights: its memory is what the real parts take, its programs are the real ones."""

import json

import jax
import jax.numpy as jnp
import pytest

from mopd_jax.config import Kind, Objective, Precision
from mopd_jax.data import miniature
from mopd_jax.model import sharding
from mopd_jax.run import parts, plan
from mopd_jax.run.estimate import Lane
from tests import tiny
from tests.fixtures import tiny_config

SIZES = plan.Sizes(tiny_config(num_heads=8, num_kv_heads=4), "the test")
LARGER = plan.Sizes(tiny_config(num_heads=8, num_kv_heads=4, num_layers=5), "the test")


def make_config(kind: Kind = Kind.REINFORCE):
    """A distilled cascade on eight devices, four of which sample."""
    config = tiny.team()
    config.train.kind = kind
    config.mesh.shape, config.mesh.rollout_tensor = (1, 4, 2), 4
    config.model.frozen = config.model.rollout = Precision.BFLOAT16
    return config


def make_plan(config, devices: bool = False) -> plan.Plan:
    sizes = {"start": SIZES, "teacher": LARGER}
    if devices:
        meshes = sharding.make_mesh((1, 4, 2)), sharding.make_mesh((1, 1, 4), jax.devices()[:4])
    else:
        meshes = sharding.abstract_mesh((1, 4, 2)), sharding.abstract_mesh((1, 1, 4))
    return plan.make_plan(config, sizes, *meshes)


def on_first_device(tree) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


# ---------------------------------------------------------------- sizes


def test_sizes_of_random_weights_are_those_that_a_run_makes(tmp_path):
    config = tiny.imitate("random")
    config.run.dir = str(tmp_path)
    found = plan.find_sizes("random", config, {}, SIZES)
    assert found.model == parts.open_model("random", config).model.config
    assert found.model.vocab_size == miniature.vocabulary_size()


def test_sizes_are_those_of_an_earlier_phase_of_a_folder_or_assumed(tmp_path):
    config = make_config()
    sizes = {"vocab_size": 99, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-6}
    sizes |= {"tie_word_embeddings": True, "max_position_embeddings": 64, "rope_theta": 1e4}
    sizes |= {"model_type": "qwen3", "hidden_act": "silu"}
    for folder in (tmp_path / "checkpoint", tmp_path / "run" / "export"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(sizes))
    for spec in (tmp_path / "checkpoint", tmp_path / "run"):
        found = plan.find_sizes(str(spec), config, {}, SIZES)
        assert found.model.vocab_size == 99 and found.source.endswith("config.json")
    assert plan.find_sizes("runs/a", config, {"runs/a": LARGER}, SIZES) is LARGER
    assert plan.find_sizes("runs/b", config, {"runs/a": LARGER}, SIZES) is SIZES
    assert plan.assumed_sizes("qwen3-4b").model.rope_theta == 5e6


# ---------------------------------------------------------------- memory


def test_a_judge_that_is_a_model_is_held_beside_the_others():
    config = make_config()
    config.learn.searcher, config.model.teacher, config.model.judge = Objective.CRITIC, "", "judge"
    config.model.reference = "start"
    meshes = sharding.abstract_mesh((1, 4, 2)), sharding.abstract_mesh((1, 1, 4))
    sizes = {"start": SIZES, "judge": LARGER}
    found = plan.memory(plan.make_plan(config, sizes, *meshes))
    as_teacher = plan.memory(make_plan(make_config()))["frozen teacher"]
    assert found["judge"] == as_teacher > found["frozen start"]
    config.model.judge = "scripted"
    assert "judge" not in plan.memory(plan.make_plan(config, {"start": SIZES}, *meshes))


@pytest.fixture(scope="module")
def real() -> plan.Plan:
    return make_plan(make_config(), devices=True)


def test_memory_is_what_the_real_parts_take(real):
    kinds = plan.memory(real)
    params = sharding.init_params(real.student, jax.random.key(0), real.mesh)
    state = real.learner.init_state(jax.tree.map(jnp.copy, params))
    teacher = sharding.init_params(real.frozen["teacher"].model, jax.random.key(0), real.mesh, jnp.bfloat16)
    real.engine.load(params)
    lanes = real.engine._lanes
    assert kinds == {
        plan.MASTER: on_first_device(state.params),
        plan.GRADIENT: on_first_device(state.params),
        plan.ADAM: on_first_device(state.opt_state),
        "frozen teacher": on_first_device(teacher),
        plan.SAMPLED: on_first_device(real.engine._params),
        "cache, 1 candidate": on_first_device(lanes[1]._state.cache),
        "cache, 5 candidates": on_first_device(lanes[5]._state.cache),
    }


def test_memory_needs_no_devices(real):
    assert plan.memory(make_plan(make_config())) == plan.memory(real)


def test_an_evaluation_holds_an_engine_only():
    found = plan.memory(make_plan(make_config(Kind.EVALUATE)))
    assert sorted(found) == ["cache, 1 candidate", plan.SAMPLED]


def with_searcher():
    """An evaluation in which a larger model plays the Searcher."""
    config = make_config(Kind.EVALUATE)
    config.model.searcher = "teacher"
    return config


def test_a_searcher_of_its_own_is_held_beside_the_team():
    """It has five layers instead of three, and nothing else is larger."""
    found = make_plan(with_searcher())
    kinds = plan.memory(found)
    alone = plan.memory(make_plan(make_config(Kind.EVALUATE)))
    assert {kind: size for kind, size in kinds.items() if kind in alone} == alone
    assert kinds.keys() - alone.keys() == {"engine's weights, Searcher", "cache, 1 candidate, Searcher"}
    cache, own = kinds["cache, 1 candidate"], kinds["cache, 1 candidate, Searcher"]
    assert 1.6 * cache < own < 1.7 * cache
    assert all(map(plan.is_engines, kinds))
    around = plan.beside(found, sampling=True, arguments={plan.SAMPLED, "cache, 1 candidate"})
    assert around == own + kinds["engine's weights, Searcher"]


def test_a_supervised_phase_samples_nothing_unless_it_is_validated():
    config = make_config(Kind.SUPERVISED)
    assert sorted(plan.memory(make_plan(config))) == sorted([plan.ADAM, plan.GRADIENT, plan.MASTER])
    config.eval.every = 5
    assert {plan.SAMPLED, "cache, 1 candidate"} <= plan.memory(make_plan(config)).keys()


def test_what_stays_beside_a_program():
    found = make_plan(make_config())
    kinds = plan.memory(found)
    always = kinds[plan.MASTER] + kinds[plan.ADAM] + kinds["frozen teacher"]
    sampling = plan.beside(found, sampling=True, arguments={plan.SAMPLED, "cache, 1 candidate"})
    assert sampling == always + kinds["cache, 5 candidates"]
    updating = plan.beside(found, sampling=False, arguments={plan.MASTER, plan.GRADIENT})
    assert updating == kinds[plan.ADAM] + kinds["frozen teacher"]


# ---------------------------------------------------------------- programs


def test_programs_of_a_step(real):
    config = real.config
    found = {program.name: program for program in plan.programs(real)}
    assert list(found) == [
        "hand-over: cast",
        "prefill, 8 × 1",
        "decode, 8 × 1",
        "copy, 8 × 1",
        "commit, 8 × 1",
        "prefill, 2 × 5",
        "decode, 2 × 5",
        "copy, 2 × 5",
        "score",
        "update: accumulate",
        "update: apply",
    ]
    assert found["decode, 2 × 5"].lane == Lane(2, 5, config.team.row_tokens, config.team.answerer_tokens)
    assert found["decode, 8 × 1"].lane == Lane(8, 1, config.team.row_tokens, 8, parked=4)
    assert (found["decode, 2 × 5"].devices, found["score"].devices) == (4, 8)
    micro = plan.longest_rows(real)
    assert micro.ids.shape == (4, 208) and micro.source.shape == (4, 208)
    assert [p.name for p in found.values() if p.lane is None and p.work.model] == [
        "score",
        "update: accumulate",
    ]


def test_an_evaluation_compiles_the_one_candidate_lane():
    found = plan.programs(make_plan(make_config(Kind.EVALUATE), devices=True))
    assert [p.name for p in found] == ["prefill, 8 × 1", "decode, 8 × 1", "copy, 8 × 1", "commit, 8 × 1"]


def test_programs_of_a_searcher_of_its_own_are_those_of_its_sizes():
    found = {p.name: p for p in plan.programs(make_plan(with_searcher(), devices=True))}
    assert list(found)[4:] == [f"{name}, Searcher" for name in list(found)[:4]]
    decode, own = found["decode, 8 × 1"], found["decode, 8 × 1, Searcher"]
    assert (decode.model.num_layers, own.model.num_layers) == (3, 5) and own.lane == decode.lane
    kinds = plan.memory(make_plan(with_searcher()))
    assert own.beside == kinds[plan.SAMPLED] + kinds["cache, 1 candidate"]
    assert own.work.model > decode.work.model
