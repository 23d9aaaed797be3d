"""What passes between a workflow and the world, and what is left of it: turns, rows, episodes.

Plain Python and NumPy: no JAX, no tokenizer. Shape letter: T tokens of a row.
"""

import enum
from dataclasses import dataclass, field

import numpy as np

from mopd_jax.retrieval.search import Document


class Role(enum.Enum):
    """Who speaks; one model plays all of a workflow's roles, unless the Searcher has one of its own."""

    LEADER = "leader"
    SEARCHER = "searcher"
    ANSWERER = "answerer"
    AGENT = "agent"
    """The single agent, which searches and answers itself."""
    JUDGE = "judge"
    """The critic's judge, which stands outside of the team."""


class Stop(enum.Enum):
    """Why a sampled turn ended."""

    END = "end"
    """The end-of-turn token was sampled (it is the turn's last id)."""
    LENGTH = "length"
    """The limit of new tokens was reached."""
    CONTEXT = "context"
    """Nothing was sampled: the conversation had no room for another turn."""


class Status(enum.Enum):
    """How a row ended."""

    FINISHED = "finished"
    MALFORMED = "malformed"
    LENGTH = "truncated: length"
    CONTEXT = "truncated: context"


@dataclass(frozen=True)
class Question:
    """A question and its gold answers. `(dataset, split, id)` is unique, `id` alone is not."""

    dataset: str
    split: str
    id: str
    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Message:
    """Environment text that enters a conversation. Documents are framed and shortened by the renderer."""

    role: str
    """"system" or "user"."""
    content: str
    documents: tuple[Document, ...] = ()
    """If any, they follow `content` as a `<documents>` block."""


@dataclass(frozen=True)
class SampleRequest:
    """Ask for the next turn of a conversation."""

    role: Role
    session: int
    """Number of the conversation in its workflow, from 0 in order of opening."""
    messages: tuple[Message, ...]
    """What is new since the last turn: system + user in the first, user afterwards."""
    max_tokens: int
    candidates: int = 1
    """Independent samples of this turn; above 1 the conversation ends with it."""


@dataclass(frozen=True)
class SearchRequest:
    """Ask the retriever."""

    query: str


@dataclass(frozen=True)
class Turn:
    """One sampled turn as text (the end-of-turn token left out)."""

    text: str
    stop: Stop
    input_tokens: int = 0
    """Length of the prompt it was sampled from."""


Request = SampleRequest | SearchRequest
Reply = tuple[Turn, ...] | tuple[Document, ...]
"""To a SampleRequest one Turn per candidate, to a SearchRequest the documents."""


@dataclass(frozen=True)
class Session:
    """How one conversation ended, as the workflow saw it. One per candidate for an answer request."""

    role: Role
    session: int
    candidate: int
    status: Status
    searches: int
    """Searches executed in this session."""
    body: str
    """The closing action's text (summary or answer); "" where there is none. Of a single agent's malformed
    last turn the answer that it holds nonetheless."""
    reason: str = ""
    """Why the row is malformed; "" otherwise."""
    task: str = ""
    """What a Searcher or the single agent was asked for."""


@dataclass(frozen=True)
class Outcome:
    """What a workflow returns."""

    sessions: tuple[Session, ...]
    answers: tuple[str, ...]
    """One per candidate, "" for a candidate that gave none; empty without an answer request."""
    searches: int
    """Environment steps that contained a search, over all sessions."""


@dataclass
class Row:
    """One role's conversation as token streams of equal length T."""

    role: Role
    session: int
    candidate: int
    status: Status
    searches: int
    body: str
    ids: np.ndarray
    """int32 [T]"""
    mask: np.ndarray
    """bool [T]: True exactly on sampled ids, the sampled end-of-turn included."""
    logps: np.ndarray
    """float32 [T]: the sampler's log-probabilities on sampled ids, 0 elsewhere."""
    turns: int = 0
    """Sampled turns."""
    reason: str = ""
    """Why the row is malformed; "" otherwise."""
    task: str = ""
    """What a Searcher or the single agent was asked for."""
    score: float | None = None
    """What the judge gave a Searcher, 0 to 1; None where it gave none."""

    def __post_init__(self):
        if not len(self.ids) == len(self.mask) == len(self.logps):
            raise ValueError(
                f"A row's streams must be of equal length, found ids {len(self.ids)}, "
                f"mask {len(self.mask)}, logps {len(self.logps)}."
            )

    def turn_bounds(self) -> list[tuple[int, int]]:
        """Returns where each sampled turn starts and ends; there is a prompt before every one."""
        edges = np.flatnonzero(np.diff(self.mask, prepend=False, append=False)).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass
class Episode:
    """One workflow's run on one question."""

    question: Question
    draw: int
    """Which draw of this question (training step) or which attempt (evaluation)."""
    workflow: int
    """Number of the workflow within its draw, 0 … G − 1."""
    rows: list[Row] = field(default_factory=list)
    answers: tuple[str, ...] = ()
    searches: int = 0
    tree: int | None = None
    """Number of its tree within its draw, if it is a leaf of one."""
    aborted: bool = False
    """A search failed for good: no rows, no reward, no gradient."""
    calls: int = 0
    """Model calls; the candidates of one answer request are one call each."""
    input_tokens: int = 0
    """Sum of the prompt lengths over model calls, caches ignored."""
    output_tokens: int = 0
    """Sampled tokens."""
    queries: tuple[str, ...] = ()
    """Executed searches in order."""
    documents: tuple[tuple[Document, ...], ...] = ()
    """What each of them returned."""
