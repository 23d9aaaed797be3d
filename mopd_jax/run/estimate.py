"""How much a program computes and moves, by formula.

A compiler's own count sees the body of a loop once and nothing of a hand-written kernel, so it cannot say.
FLOPs count a multiplication and an addition as two. "Model" FLOPs are those that the mathematics asks for:
one forward pass, two more for the gradient, the causal half of attention, nothing twice. "Executed" FLOPs
include what the program computes again and what it computes in vain.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mopd_jax.config import Attention, Remat, TeamConfig, Workflow
from mopd_jax.model.qwen3 import Qwen3Config
from mopd_jax.objective_rules import ROLES


@dataclass(frozen=True)
class Work:
    """FLOPs of one call of a program, over all its devices."""

    model: float
    executed: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.model + other.model, self.executed + other.executed)

    @property
    def ceiling(self) -> float:
        """Most that the model FLOPs utilisation can reach: the rest of the time is spent on other work."""
        return self.model / self.executed


# ---------------------------------------------------------------- weights


def layer_weights(c: Qwen3Config) -> int:
    """Returns the weights of all layers that take part in products with every token."""
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def head_weights(c: Qwen3Config) -> int:
    """Returns the weights of the output head, which are the embedding's where the two are tied."""
    return c.hidden_size * c.vocab_size


def parameters(c: Qwen3Config) -> int:
    """Returns all parameters, norms included."""
    norms = c.num_layers * 2 * (c.hidden_size + c.head_dim) + c.hidden_size
    return layer_weights(c) + (1 if c.tie_word_embeddings else 2) * head_weights(c) + norms


# ---------------------------------------------------------------- learning


@dataclass(frozen=True)
class Rows:
    """Packed rows, each one long segment: the most that attention can cost."""

    count: float
    length: float
    generated: float
    """Tokens per row that are unembedded."""


SPLASH_BACKWARD = 3.5
"""Products of the kernel's two backward programs (4 + 3), relative to the two of its forward one."""


def _forward(c: Qwen3Config, rows: Rows) -> tuple[float, float, float]:
    """Returns model FLOPs of one pass: layers without attention scores, scores and their values, head."""
    layers = 2 * layer_weights(c) * rows.count * rows.length
    scores = 2 * c.num_layers * c.num_heads * c.head_dim * rows.count * rows.length**2
    return layers, scores, 2 * head_weights(c) * rows.count * rows.generated


def _whole_square(c: Qwen3Config) -> int:
    """Plain attention computes the masked half as well."""
    return 1 if c.attention is Attention.SPLASH else 2


def score_work(models: Iterable[Qwen3Config], rows: Rows) -> Work:
    """Returns the work of one pass of each model: 2 N per token, and attention."""
    total = Work(0, 0)
    for c in models:
        layers, scores, head = _forward(c, rows)
        total += Work(layers + scores + head, layers + _whole_square(c) * scores + head)
    return total


def update_work(c: Qwen3Config, rows: Rows) -> Work:
    """Returns the work of a forward and a backward pass: 6 N per token, and attention; 8 N where layers are
    computed again. Attention and the head's logits always are."""
    layers, scores, head = _forward(c, rows)
    again = 1 if c.remat is Remat.FULL else 0
    backward = SPLASH_BACKWARD if c.attention is Attention.SPLASH else 2
    executed_scores = _whole_square(c) * scores * (2 + backward)
    return Work(3 * (layers + scores + head), (3 + again) * layers + executed_scores + 4 * head)


# ---------------------------------------------------------------- sampling


@dataclass(frozen=True)
class Lane:
    """Capacities of a cache: G groups of one history and C turns, and Q parking places of a history."""

    groups: int
    candidates: int
    history: int
    turn: int
    parked: int = 0

    @property
    def slots(self) -> int:
        """Candidates of all groups."""
        return self.groups * self.candidates


def prefill_work(c: Qwen3Config, rows: int, tokens: int, history: int) -> Work:
    """Returns the work of one prefill call half-way through the history: the program masks the rest of it."""
    layers = 2 * layer_weights(c) * rows * tokens
    scores = 4 * c.num_layers * c.num_heads * c.head_dim * rows * tokens * history
    return Work(layers + scores / 2, layers + scores)


def decode_work(c: Qwen3Config, lane: Lane) -> Work:
    """Returns the work of one step of every slot over a full cache."""
    products = 2 * (layer_weights(c) + head_weights(c)) * lane.slots
    scores = 4 * c.num_layers * c.num_heads * c.head_dim * lane.slots * (lane.history + lane.turn)
    return Work(products + scores, products + scores)


def cache_bytes(c: Qwen3Config, lane: Lane, itemsize: int) -> int:
    """Returns the bytes of keys and values: a group's history is held once for all its candidates."""
    return _slot_bytes(c, lane, itemsize) + _token_bytes(c, itemsize) * lane.parked * lane.history


def _slot_bytes(c: Qwen3Config, lane: Lane, itemsize: int) -> int:
    return _token_bytes(c, itemsize) * lane.groups * (lane.history + lane.candidates * lane.turn)


def copied_cache_bytes(c: Qwen3Config, lane: Lane, itemsize: int) -> int:
    """Returns the bytes that the same slots would take with a copy of the history for every candidate."""
    return _token_bytes(c, itemsize) * lane.slots * (lane.history + lane.turn)


def decode_bytes(c: Qwen3Config, lane: Lane, itemsize: int) -> int:
    """Returns the bytes that one step over a full cache has to read: every weight and what is not parked,
    once."""
    return itemsize * (layer_weights(c) + head_weights(c)) + _slot_bytes(c, lane, itemsize)


def _token_bytes(c: Qwen3Config, itemsize: int) -> int:
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * itemsize


# ---------------------------------------------------------------- a workflow

PROMPT_TOKENS = 400
"""Of a role's prompt with the question [D]: what Qwen's tokenizer makes of ours, roughly."""
USED = 0.5
"""Share of each limit of the team that a workflow is assumed to use [D]: 6 of 12 searches, where the paper
counts 5.4 per workflow."""


def workflow_rows(team: TeamConfig, candidates: int) -> dict[str, Rows]:
    """Returns the rows that one workflow is assumed to leave, by role.

    Sessions, searches and the tokens of a turn are `USED` of their limits; documents are as long as allowed.
    """
    hierarchy = team.workflow is Workflow.HIERARCHY
    sessions = max(1.0, USED * (team.leader_turns - 1)) if hierarchy else 1.0
    searches = min(team.session_searches, USED * team.workflow_searches / sessions)
    summaries = sessions * USED * team.searcher_tokens
    searcher = (searches + 1) * USED * team.searcher_tokens
    rows = {
        "leader": (1, (sessions + 1) * USED * team.leader_tokens, summaries),
        "searcher": (sessions, searcher, searches * team.document_tokens),
        "answerer": (candidates, USED * team.answerer_tokens, summaries),
        "agent": (1, searcher, searches * team.document_tokens),
    }
    return {
        role: Rows(count, min(team.row_tokens, PROMPT_TOKENS + generated + read), generated)
        for role, (count, generated, read) in rows.items()
        if role in ROLES[team.workflow]
    }
