"""Stand-ins for the model and the retriever, and short ways to write rows and episodes by hand."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mopd_jax.retrieval.search import Document
from mopd_jax.team.episode import (
    Episode,
    Outcome,
    Question,
    Reply,
    Request,
    Role,
    Row,
    SampleRequest,
    SearchRequest,
    Status,
    Stop,
    Turn,
)
from mopd_jax.team.workflows import Steps

DOCUMENTS = tuple(Document(str(i), f'"Title {i}"\ntext {i}') for i in range(3))


@dataclass
class Played:
    """A workflow that ran on a script."""

    outcome: Outcome | None = None
    requests: list[Request] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def asked(self, role: Role) -> list[SampleRequest]:
        """Returns the turns that were asked of a role."""
        return [r for r in self.requests if isinstance(r, SampleRequest) and r.role is role]

    @property
    def queries(self) -> list[str]:
        return [r.query for r in self.requests if isinstance(r, SearchRequest)]


def turns(*texts: str | Turn) -> tuple[Turn, ...]:
    """Returns the candidates' turns; a plain text ended by itself."""
    return tuple(text if isinstance(text, Turn) else Turn(text, Stop.END) for text in texts)


def play(
    workflow: Steps,
    script: Iterable[str | Turn | tuple[str | Turn, ...]],
    documents: tuple[Document, ...] = DOCUMENTS,
) -> Played:
    """Runs a workflow: each turn it asks for is the script's next item, every search finds `documents`.

    The script must last exactly as long as the workflow.
    """
    lines = list(script)
    played, reply = Played(), None
    while True:
        try:
            request = workflow.send(reply)
        except StopIteration as stop:
            played.outcome = stop.value
            break
        played.requests.append(request)
        if isinstance(request, SearchRequest):
            reply = documents
        else:
            assert lines, f"The script ended before the workflow: {request}"
            line = lines.pop(0)
            reply = turns(*line) if isinstance(line, tuple) else turns(line)
            assert len(reply) == request.candidates
        played.replies.append(reply)
    assert not lines, f"The workflow ended before the script: {lines}"
    return played


def make_question(id: str = "7", dataset: str = "nq", answers: tuple[str, ...] = ("Paris",)) -> Question:
    return Question(dataset, "train", id, "What is the capital of France?", answers)


def make_row(
    role: Role,
    body: str = "",
    *,
    status: Status = Status.FINISHED,
    session: int = 0,
    candidate: int = 0,
    searches: int = 0,
    mask: tuple[int, ...] = (0, 1, 1),
) -> Row:
    """Returns a row whose streams are as long as `mask`; sampled log-probs are −1."""
    sampled = np.array(mask, bool)
    ids = np.arange(len(mask), dtype=np.int32)
    logps = np.where(sampled, -1.0, 0.0).astype(np.float32)
    return Row(role, session, candidate, status, searches, body, ids, sampled, logps)


def make_answers(*bodies: str, session: int = 1) -> list[Row]:
    """Returns the candidates of one answer request; an empty body is a malformed one."""
    return [
        make_row(
            Role.ANSWERER,
            body,
            status=Status.FINISHED if body else Status.MALFORMED,
            session=session,
            candidate=candidate,
        )
        for candidate, body in enumerate(bodies)
    ]


def make_episode(*rows: Row, question: Question | None = None, draw: int = 0, workflow: int = 0) -> Episode:
    """Returns an episode whose answers and searches are those of its rows."""
    return Episode(
        question or make_question(),
        draw,
        workflow,
        rows=list(rows),
        answers=tuple(row.body for row in rows if row.role is Role.ANSWERER),
        searches=sum(row.searches for row in rows),
    )
