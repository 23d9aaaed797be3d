"""Scoring and updating a tiny Qwen3: the method's identities, and one step worked out by hand.

Most tests share one shape (4 packed rows of 16 tokens, 12 generated positions), so that each program
is compiled once.
"""

import logging
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mopd_jax.config import LearnConfig, OptimConfig, Schedule
from mopd_jax.learn.advantages import Advantages, RowScores, token_advantages
from mopd_jax.learn.learner import Learner, NonFiniteLoss, learning_rate
from mopd_jax.learn.loss import Streams
from mopd_jax.learn.score import Frozen, Scorer
from mopd_jax.learn.streams import TokenRows, imitation_streams, pack_rows, policy_streams, twin_keys
from mopd_jax.model import sharding
from mopd_jax.team.episode import Role, Row
from tests.fakes import make_episode, make_row
from tests.tiny_qwen3 import make_model, make_params, random_ids

LEARN = LearnConfig(kl=0.0, row_buckets=(16,), micro_batch_tokens=64, logit_chunk=8)
WIDE = replace(LEARN, row_buckets=(32,), micro_batch_tokens=256)
"""Other packing: two or three rows side by side, one micro-batch, more padding."""
OPTIM = OptimConfig(lr=2e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1, max_grad_norm=0.1)
STEPS = 100


@pytest.fixture(scope="module")
def model():
    return make_model(num_layers=2, vocab_size=40)  # even: a mesh splits the vocabulary


@pytest.fixture(scope="module")
def mesh():
    return sharding.make_mesh((1, 1, 1), jax.devices()[:1])


@pytest.fixture(scope="module")
def params(model, mesh):
    return jax.device_put(make_params(model), sharding.param_shardings(model, mesh))


@pytest.fixture(scope="module")
def learner(model, mesh):
    return Learner(model, LEARN, OPTIM, STEPS, mesh)


@pytest.fixture(scope="module")
def scorer(model, mesh, params):
    """Teachers: one with the student's weights, and one that was trained otherwise."""
    other = jax.tree.map(lambda x, y: 0.5 * (x + y), params, make_params(model, seed=1))
    frozen = {"same": Frozen(model, jax.tree.map(jnp.copy, params)), "other": Frozen(model, other)}
    return Scorer(model, frozen, LEARN.logit_chunk, mesh)


@pytest.fixture(scope="module")
def first_state(learner, params):
    return learner.init_state(jax.tree.map(jnp.copy, params))


@pytest.fixture
def state(first_state):
    """A fresh copy: an update takes the state it is given."""
    return jax.tree.map(jnp.copy, first_state)


@pytest.fixture(scope="module")
def pod(model):
    """A learner whose rows, weights and vocabulary are split over eight devices."""
    return Learner(model, LEARN, OPTIM, STEPS, sharding.make_mesh((2, 2, 2)))


def spread(params, model):
    """Returns a copy of the parameters on the eight devices."""
    layout = sharding.param_shardings(model, sharding.make_mesh((2, 2, 2)))
    return jax.device_put(jax.tree.map(np.asarray, params), layout), layout


def make_rows(*masks: str, seed: int = 0) -> list[Row]:
    """Returns Searcher rows with random ids and sampler log-probs; "x" is a generated token."""
    rng = np.random.default_rng(seed)
    rows = [make_row(Role.SEARCHER, mask=tuple(c == "x" for c in mask)) for mask in masks]
    for row in rows:
        row.ids = random_ids(rng, len(row.ids))
        row.logps = np.where(row.mask, rng.uniform(-5, -1, len(row.ids)), 0.0).astype(np.float32)
    return rows


ROWS = make_rows(
    "....xxxxxxxxxxxx",  # a long reply
    "..xxxx...xxx..xx",  # three turns
    "...xxxxxxxxxxxx",
    ".xxx.x.x.xxxx.x",  # holes
    "..xxxxxxxxx",
    ".....x",  # a one-token reply
    ".x",
)


def score(scorer, params, packed: TokenRows, count: int, teacher: str = "other") -> list[RowScores]:
    """Returns what the fused pass says of every row."""
    scored = [jax.device_get(scorer(params, micro)) for micro in packed.batch.micros]
    old = packed.gather([student.logps for student, _ in scored], count)
    taught = packed.gather([frozen[teacher].logps for _, frozen in scored], count)
    return [RowScores(*pair) for pair in zip(old, taught, strict=True)]


def distil(
    scorer, params, rows: list[Row], teacher: str = "other", learn: LearnConfig = LEARN
) -> tuple[TokenRows, Advantages, list]:
    """Returns packed rows, OPD advantages and streams, the way a training step makes them."""
    packed = pack_rows(rows, learn, shards=1)
    scores = score(scorer, params, packed, len(rows), teacher)
    advantages = token_advantages([make_episode(*rows)], learn, scores)
    return packed, advantages, policy_streams(rows, packed, advantages, [s.old for s in scores], learn)


@dataclass
class Signals:
    """Random advantages, masks and old log-probs per row, far enough from the policy for the clip to bind."""

    advantages: Advantages
    old: list[np.ndarray]

    def streams(self, rows: list[Row], packed: TokenRows, order: list[int]) -> list[Streams]:
        values = [self.advantages.values[i] for i in order]
        masks = [self.advantages.masks[i] for i in order]
        old = [self.old[i] for i in order]
        return policy_streams(rows, packed, Advantages(values, masks, 0, 0, 0), old, LEARN)


@pytest.fixture(scope="module")
def signals(scorer, params) -> Signals:
    rng = np.random.default_rng(5)
    counts = [int(row.mask.sum()) for row in ROWS]
    scores = score(scorer, params, pack_rows(ROWS, LEARN, shards=1), len(ROWS))
    values = [rng.normal(size=n).astype(np.float32) for n in counts]
    masks = [rng.random(n) < 0.8 for n in counts]
    old = [(s.old + rng.normal(0, 0.3, len(s.old))).astype(np.float32) for s in scores]
    return Signals(Advantages(values, masks, 0, 0, 0), old)


@pytest.fixture(scope="module")
def expected(learner, params, signals):
    """The gradient of `signals` in the common shape."""
    packed = pack_rows(ROWS, LEARN, shards=1)
    assert [micro.source.shape for micro in packed.batch.micros] == [(4, 12)] * 2
    return learner.gradient(
        params, packed.batch.micros, signals.streams(ROWS, packed, list(range(len(ROWS))))
    )


def assert_same_tree(found, expected, rtol=1e-5):
    """Equal up to `rtol` of each array's largest element."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        b = np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def host(tree) -> dict[str, np.ndarray]:
    """Returns a tree's leaves by path, float64."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in leaves}


# ---------------------------------------------------------------- teacher and student


def test_a_teacher_with_the_student_s_weights_gives_exactly_zero(scorer, params):
    _, advantages, streams = distil(scorer, params, ROWS, "same")
    assert advantages.dropped_tokens == 0
    for row, value, mask in zip(ROWS, advantages.values, advantages.masks, strict=True):
        assert mask.all() and len(value) == row.mask.sum() > 0
        assert not value.any()  # bit for bit
    assert not any(s.advantage.any() for s in streams)


def test_another_teacher_gives_beta_times_the_log_ratio(scorer, params):
    packed, advantages, _ = distil(scorer, params, ROWS)
    for scored, value in zip(score(scorer, params, packed, len(ROWS)), advantages.values, strict=True):
        assert value.any()
        np.testing.assert_allclose(value, 0.01 * (scored.teacher - scored.old), rtol=1e-5, atol=1e-8)


def test_changing_the_teacher_changes_the_gradient(learner, scorer, params):
    gradients = {}
    for teacher in ("same", "other"):
        packed, _, streams = distil(scorer, params, ROWS, teacher)
        gradients[teacher] = learner.gradient_norm(params, packed.batch.micros, streams)
    assert gradients["same"] == 0.0
    assert gradients["other"] > 1e-4


@pytest.mark.parametrize("sign", [1, -1], ids=["likes more", "likes less"])
def test_a_token_moves_towards_the_teacher(sign, learner, scorer, params, state):
    """One update on the one token about which teacher and student differ most, one way or the other."""
    packed, advantages, _ = distil(scorer, params, ROWS)
    row = max(range(len(ROWS)), key=lambda i: (sign * advantages.values[i]).max())
    token = int(np.argmax(sign * advantages.values[row]))
    chosen = [np.zeros_like(mask) for mask in advantages.masks]
    chosen[row][token] = True
    before = score(scorer, params, packed, len(ROWS))
    alone = replace(advantages, masks=chosen)
    streams = policy_streams(ROWS, packed, alone, [s.old for s in before], LEARN)
    state, _ = learner.update(state, packed.batch.micros, streams)
    after = score(scorer, state.params, packed, len(ROWS))
    assert sign * (before[row].teacher[token] - before[row].old[token]) > 0.5
    assert sign * (after[row].old[token] - before[row].old[token]) > 0.01


def test_unchanged_weights_give_ratio_one(learner, scorer, params, state, signals):
    """Kind 14. Own log-probs are those of the fused pass: the loss is −Σ w m A / N, no clip binds."""
    packed = pack_rows(ROWS, LEARN, shards=1)
    old = [s.old for s in score(scorer, params, packed, len(ROWS))]
    streams = policy_streams(ROWS, packed, signals.advantages, old, LEARN)
    _, report = learner.update(state, packed.batch.micros, streams)
    importance = [np.minimum(2.0, np.exp(s.old - s.sampler)) for s in streams]
    plain = sum((w * s.weight * s.advantage).sum() for w, s in zip(importance, streams, strict=True))
    np.testing.assert_allclose(report.loss, -plain, rtol=1e-5)
    nll = sum((s.weight * s.old).sum() for s in streams) / sum(s.weight.sum() for s in streams)
    np.testing.assert_allclose(report.nll, -nll, rtol=1e-6)
    assert report.clip_fraction == 0


def test_a_second_update_on_the_same_batch_has_another_ratio_and_the_clip_binds(
    learner, scorer, params, state, signals
):
    packed = pack_rows(ROWS, LEARN, shards=1)
    old = [s.old for s in score(scorer, params, packed, len(ROWS))]
    streams = policy_streams(ROWS, packed, signals.advantages, old, LEARN)
    state, first = learner.update(state, packed.batch.micros, streams)
    moved = packed.scatter([s.old for s in score(scorer, state.params, packed, len(ROWS))])
    state, second = learner.update(state, packed.batch.micros, streams)

    loss = binding = weight = 0.0
    for s, logps in zip(streams, moved, strict=True):
        ratio, A = np.exp(logps - s.old), s.advantage
        gain = np.minimum(ratio * A, np.clip(ratio, 0.8, 1.2) * A)
        loss -= (s.weight * np.minimum(2.0, np.exp(s.old - s.sampler)) * gain).sum()
        binding += s.weight[gain < ratio * A].sum()
        weight += s.weight.sum()
    np.testing.assert_allclose(second.loss, loss, rtol=1e-4)
    np.testing.assert_allclose(second.clip_fraction, binding / weight, rtol=1e-4)
    assert first.clip_fraction == 0 < second.clip_fraction < 1
    assert int(state.step) == 2


# ---------------------------------------------------------------- one gradient, however it is computed


def test_gradient_does_not_depend_on_the_order_of_the_rows(learner, params, signals, expected):
    """Kind 15."""
    order = [5, 2, 0, 6, 3, 1, 4]
    rows = [ROWS[i] for i in order]
    packed = pack_rows(rows, LEARN, shards=1)
    found = learner.gradient(params, packed.batch.micros, signals.streams(rows, packed, order))
    assert_same_tree(found, expected)


def compiled(caplog, name: str = "") -> list[str]:
    """Returns what XLA was asked to compile since the log was cleared, inside `jax.log_compiles`."""
    messages = [record.getMessage() for record in caplog.records]
    return [m for m in messages if m.startswith("Compiling") and name in m]


def test_gradient_on_eight_devices_is_that_of_one(pod, model, params, signals, expected, caplog):
    """Kind 15."""
    shards = sharding.row_shards(sharding.make_mesh((2, 2, 2)))
    packed = pack_rows(ROWS, LEARN, shards)
    params, layout = spread(params, model)
    streams = signals.streams(ROWS, packed, list(range(len(ROWS))))
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        found = pod.gradient(params, packed.batch.micros, streams)
    assert len(streams) == 2 and len(compiled(caplog, "_accumulate_fn")) == 1
    assert_same_tree(found, expected)
    for gradient, where in zip(jax.tree.leaves(found[0]), jax.tree.leaves(layout), strict=True):
        assert gradient.sharding.is_equivalent_to(where, gradient.ndim)


def test_gradient_does_not_depend_on_packing_padding_and_micro_batches(learner, scorer, params):
    """Kind 15. Supervised in one wide micro-batch, with other padding: what the policy gradient with A = 1,
    ρ = 1 and no sampler weight is in two narrow ones."""
    packed = pack_rows(ROWS, WIDE, shards=1)
    (micro,) = packed.batch.micros
    assert micro.ids.shape == (8, 32) and micro.segments.max() > 1
    found, _ = learner.gradient(params, packed.batch.micros, imitation_streams(ROWS, packed))

    narrow = pack_rows(ROWS, LEARN, shards=1)
    old = [s.old for s in score(scorer, params, narrow, len(ROWS))]
    rows = [replace(row, logps=row.logps.copy()) for row in ROWS]
    for row, logps in zip(rows, old, strict=True):
        row.logps[row.mask] = logps
    ones = [np.ones(len(logps), np.float32) for logps in old]
    advantages = Advantages(ones, [one > 0 for one in ones], 0, 0, 0)
    streams = policy_streams(rows, narrow, advantages, old, LEARN)
    expected, _ = learner.gradient(params, narrow.batch.micros, streams)
    assert len(streams) == 2
    assert_same_tree(found, expected)


def test_equal_candidates_packed_once_give_the_loss_and_gradient_of_all_of_them(learner, scorer, params):
    """Rewards by exact match, groups, scores and streams as in a training step, with and without twins."""
    replies = ["Rome"] * 3 + ["Paris"] * 2
    said = dict(zip(("Rome", "Paris"), make_rows("....xxxx", "....xxxx"), strict=True))
    rows = [replace(said[body], role=Role.ANSWERER, body=body, candidate=i) for i, body in enumerate(replies)]
    episodes, sums = [make_episode(*rows)], {}
    for name, keys in (("once", twin_keys(episodes)), ("each", None)):
        packed = pack_rows(rows, LEARN, 1, keys)
        scores = score(scorer, params, packed, len(rows))
        advantages = token_advantages(episodes, LEARN, scores)
        streams = policy_streams(rows, packed, advantages, [s.old for s in scores], LEARN)
        sums[name] = learner.gradient(params, packed.batch.micros, streams)
        assert len(packed.twins) == {"once": 2, "each": 5}[name]
    assert_same_tree(sums["once"], sums["each"])
    assert abs(float(sums["once"][1].loss)) > 1e-3


def test_padding_contributes_exactly_nothing(learner, params, signals, expected):
    """Kind 16. Whatever stands in padded tokens, padded rows and unused positions, be it an end of turn."""
    packed = pack_rows(ROWS, LEARN, shards=1)
    streams = signals.streams(ROWS, packed, list(range(len(ROWS))))
    micros = packed.batch.micros
    assert all(not (micro.segments > 0).any(axis=1).all() for micro in micros), "no padded row"
    micros = [micro._replace(ids=np.where(micro.segments > 0, micro.ids, 39)) for micro in micros]
    poisoned = [
        s.replace(**{
            name: np.where(s.weight > 0, getattr(s, name), np.float32(1e3))
            for name in ("advantage", "old", "sampler")
        })
        for s in streams
    ]  # fmt: skip
    found = learner.gradient(params, micros, poisoned)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("count", [9, 23])
def test_any_number_of_rows_is_one_optimizer_step(count, learner, scorer, params, state):
    """Kind 16."""
    rows = [
        row for seed in range(4) for row in make_rows(*["....xxxxxxxxxxxx", "..xxxxxxxxxx"] * 3, seed=seed)
    ]
    packed, _, streams = distil(scorer, params, rows[:count])
    assert len(packed.batch.micros) == -(-count // 4)
    before = host(state.params)
    state, _ = learner.update(state, packed.batch.micros, streams)
    assert int(state.step) == 1
    np.testing.assert_allclose(sum(s.weight.sum() for s in streams), 1.0, rtol=1e-5)
    largest = max(np.abs(x - before[name]).max() for name, x in host(state.params).items())
    assert 0.9 * OPTIM.lr < largest < 1.2 * OPTIM.lr  # Adam's first step, plus a little decay


def test_scores_do_not_depend_on_the_logit_chunk(model, mesh, scorer, params):
    micro = pack_rows(ROWS, LEARN, shards=1).batch.micros[0]
    found, _ = Scorer(model, {}, 5, mesh)(params, micro)
    student, _ = scorer(params, micro)
    np.testing.assert_allclose(found.logps, student.logps, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.entropy, student.entropy, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- what is not finite


def test_a_nan_log_prob_is_dropped_and_counted(learner, scorer, params, state):
    """The step is that of the batch without the token, and the token still counts in N."""
    rows = [replace(row, logps=row.logps.copy()) for row in ROWS]
    last = np.flatnonzero(rows[0].mask)[-1]
    rows[0].logps[last] = np.nan
    packed, advantages, streams = distil(scorer, params, rows)
    assert advantages.dropped_tokens == 1
    assert advantages.masks[0].tolist() == [True] * 11 + [False]
    clean_packed, clean, _ = distil(scorer, params, ROWS)
    clean.masks[0][-1] = False
    old = [s.old for s in score(scorer, params, clean_packed, len(ROWS))]
    without = policy_streams(ROWS, clean_packed, clean, old, LEARN)
    found = learner.gradient(params, packed.batch.micros, streams)
    for a, b in zip(
        jax.tree.leaves(found),
        jax.tree.leaves(learner.gradient(params, clean_packed.batch.micros, without)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    _, report = learner.update(state, packed.batch.micros, streams)
    assert np.isfinite([report.loss, report.nll, report.grad_norm]).all() and report.grad_norm > 0


def test_a_loss_that_is_not_finite_stops_with_the_step_named(learner, scorer, params, state):
    packed, _, streams = distil(scorer, params, ROWS)
    state = state.replace(step=state.step + 17, params=jax.tree.map(lambda x: x * jnp.nan, state.params))
    with pytest.raises(NonFiniteLoss, match=r"Loss nan, gradient norm nan at optimizer step 17: "):
        learner.update(state, packed.batch.micros, streams)


# ---------------------------------------------------------------- the optimizer


def adamw(params, gradients, lr, o: OptimConfig):
    """Returns the parameters after one AdamW step per gradient, by path: plain NumPy, float64."""
    m = {name: np.zeros_like(x) for name, x in params.items()}
    v = {name: np.zeros_like(x) for name, x in params.items()}
    for t, gradient in enumerate(gradients, start=1):
        norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
        assert norm > o.max_grad_norm, "the clip is idle"
        for name, g in gradient.items():
            g = g * min(1.0, o.max_grad_norm / norm)
            m[name] = o.b1 * m[name] + (1 - o.b1) * g
            v[name] = o.b2 * v[name] + (1 - o.b2) * g**2
            step = m[name] / (1 - o.b1**t) / (np.sqrt(v[name] / (1 - o.b2**t)) + o.eps)
            decay = 0.0 if name.endswith("['scale']") else o.weight_decay
            params[name] = params[name] - lr * (step + decay * params[name])
    return params


def test_two_steps_are_those_of_adamw_by_hand(learner, params, state, signals):
    packed = pack_rows(ROWS, LEARN, shards=1)
    streams = signals.streams(ROWS, packed, list(range(len(ROWS))))
    gradients, norms = [], []
    for _ in range(2):
        gradients.append(host(learner.gradient(state.params, packed.batch.micros, streams)[0]))
        state, report = learner.update(state, packed.batch.micros, streams)
        norms.append(report.grad_norm)
        assert report.lr == pytest.approx(OPTIM.lr)
    by_hand = [math.sqrt(sum((g**2).sum() for g in gradient.values())) for gradient in gradients]
    np.testing.assert_allclose(norms, by_hand, rtol=1e-5)
    expected = adamw(host(params), gradients, OPTIM.lr, OPTIM)
    for name, found in host(state.params).items():
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=1e-3 * OPTIM.lr, err_msg=name)


def test_a_supervised_step_follows_the_mean_nll(learner, scorer, params, state):
    """Its gradient along a random direction is the slope of the fused pass' mean NLL."""
    narrow = pack_rows(ROWS, LEARN, shards=1)

    def nll(params) -> float:
        scores = score(scorer, params, narrow, len(ROWS))
        return -np.concatenate([s.old for s in scores]).astype(np.float64).mean()

    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: np.float32(rng.choice([-1.0, 1.0], x.shape)), params)
    step = 1e-3
    ahead = jax.tree.map(lambda x, d: x + step * d, params, direction)
    behind = jax.tree.map(lambda x, d: x - step * d, params, direction)
    packed = pack_rows(ROWS, WIDE, shards=1)
    micros, streams = packed.batch.micros, imitation_streams(ROWS, packed)
    gradient, sums = learner.gradient(params, micros, streams)
    slope = sum((g * d).sum() for g, d in zip(host(gradient).values(), host(direction).values(), strict=True))
    np.testing.assert_allclose(slope, (nll(ahead) - nll(behind)) / (2 * step), rtol=2e-3)
    np.testing.assert_allclose(sums.nll, nll(params), rtol=1e-6)

    state, report = learner.update(state, micros, streams)
    np.testing.assert_allclose(report.nll, nll(params), rtol=1e-6)
    assert report.clip_fraction == 0
    assert nll(state.params) < nll(params) - 0.01


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        (Schedule.CONSTANT, 0, {0: 2.0, 7: 2.0, 100: 2.0}),
        (Schedule.CONSTANT, 1, {0: 2.0, 1: 2.0}),
        (Schedule.CONSTANT, 4, {0: 0.5, 1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0, 100: 2.0}),
        (Schedule.LINEAR, 0, {0: 2.0, 7: 1.0, 14: 0.0, 20: 0.0}),
        (Schedule.LINEAR, 4, {0: 0.5, 3: 2.0, 4: 2.0, 9: 1.0, 14: 0.0}),
        (Schedule.COSINE, 0, {0: 2.0, 7: 1.0, 14: 0.0, 20: 0.0}),
        (Schedule.COSINE, 4, {0: 0.5, 3: 2.0, 4: 2.0, 9: 1.0, 14: 0.0}),
        (Schedule.COSINE, 2, {5: 1 + math.cos(math.pi / 4)}),
    ],
)
def test_learning_rate(schedule, warmup, expected):
    """14 steps; the warm-up's first step already moves."""
    rate = learning_rate(OptimConfig(lr=2.0, schedule=schedule, warmup_steps=warmup), steps=14)
    for step, value in expected.items():
        np.testing.assert_allclose(float(rate(step)), value, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- layout and programs


def test_moments_lie_as_their_parameters(pod, model, params):
    params, layout = spread(params, model)
    state = pod.init_state(params)
    moments = optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")
    for tree in (state.params, *moments):
        assert jax.tree.map(lambda x: x.sharding.spec, tree) == jax.tree.map(lambda s: s.spec, layout)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tree))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(moments))
    assert state.step.dtype == jnp.int32 and int(state.step) == 0
    assert_promised(pod.abstract_state(), state)


def test_the_state_keeps_its_layout_over_an_update(learner, scorer, params, state):
    assert_promised(learner.abstract_state(), state)
    packed, _, streams = distil(scorer, params, ROWS)
    state, _ = learner.update(state, packed.batch.micros, streams)
    assert_promised(learner.abstract_state(), state)


def assert_promised(abstract, state) -> None:
    """Shapes, types and layout are those that a checkpoint is restored into."""
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for promised, real in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (promised.shape, promised.dtype) == (real.shape, real.dtype)
        assert real.sharding.is_equivalent_to(promised.sharding, real.ndim)


def test_lowered_programs_are_those_of_an_update(pod, model, params, signals, expected):
    """Compiled from shapes alone, they give the gradient and take the step."""
    params, _ = spread(params, model)
    packed = pack_rows(ROWS, LEARN, shards=4)
    streams = signals.streams(ROWS, packed, list(range(len(ROWS))))
    lowered = pod.lower(*jax.tree.map(jax.typeof, (packed.batch.micros[0], streams[0])))
    accumulate, apply = lowered["accumulate"].compile(), lowered["apply"].compile()
    total = pod._zeros()
    for micro, stream in zip(packed.batch.micros, streams, strict=True):
        total = accumulate(params, total, pod.put(micro), pod.put(stream))
    assert_same_tree(total, expected)
    state, norm = apply(pod.init_state(params), total[0])
    assert int(state.step) == 1
    np.testing.assert_allclose(norm, optax.tree.norm(expected[0]), rtol=1e-5)


def test_twenty_batches_of_mixed_lengths_compile_nothing_new(learner, scorer, state, caplog):
    """Kind 31: a batch of every width of every bucket is seen first, then nothing is new."""
    buckets = replace(LEARN, row_buckets=(8, 16))

    def step(state, masks: list[str]):
        packed, _, streams = distil(scorer, state.params, make_rows(*masks), learn=buckets)
        state, _ = learner.update(state, packed.batch.micros, streams)
        return state, [(micro.ids.shape, micro.source.shape) for micro in packed.batch.micros]

    def mixed(seed: int) -> list[str]:
        rng = np.random.default_rng(seed)
        lengths = map(int, rng.integers(2, 17, rng.integers(1, 30)))
        return ["." * (n - sampled) + "x" * sampled for n in lengths for sampled in [int(rng.integers(1, n))]]

    warm = set()
    for length, rows in ((8, 8), (16, 4)):
        for quarter in range(1, 5):
            sampled = min(length - 1, quarter * length // 4)
            state, shapes = step(state, ["." * (length - sampled) + "x" * sampled] * rows)
            warm.update(shapes)
    assert len(warm) == 8
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        seen, counts = set(), set()
        for seed in range(20):
            state, shapes = step(state, mixed(seed))
            seen.update(shapes)
            counts.add(len(shapes))
        assert compiled(caplog) == []
        jax.jit(lambda x: x + 1)(1.0)
        assert compiled(caplog) != []  # the log does tell
    assert len(seen) >= 4 and len(counts) > 2, "the batches are all alike"
    assert int(state.step) == 8 + 20
