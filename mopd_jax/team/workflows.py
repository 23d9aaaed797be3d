"""How the team works: C-MAS (`cascade`), H-MAS (`hierarchy`), and the agent without a team (`single`).

A workflow is a generator. It yields a request (sample a turn, run a search), is resumed with the reply,
and returns its outcome. It is a pure function of its replies: a second generator that is fed the same
replies stands at the same point.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from mopd_jax.config import TeamConfig, Workflow
from mopd_jax.team import roles
from mopd_jax.team.episode import (
    Message,
    Outcome,
    Reply,
    Request,
    Role,
    SampleRequest,
    SearchRequest,
    Session,
    Status,
    Stop,
    Turn,
)
from mopd_jax.team.roles import Action, Prompts

Steps = Generator[Request, Reply, Outcome]
"""A running workflow."""


def cascade(question: str, team: TeamConfig, prompts: Prompts, candidates: int) -> Steps:
    """C-MAS: question → Searcher → Answerer [P]. The Searcher's task is the whole question."""
    record = _Record()
    summary = yield from _search(question, team, prompts, record)
    answers = yield from _answer(question, [(question, summary)], team, prompts, candidates, record)
    return record.outcome(answers)


def hierarchy(question: str, team: TeamConfig, prompts: Prompts, candidates: int) -> Steps:
    """H-MAS: question → Leader ⇄ Searcher (a fresh session per sub-task) → Answerer [P].

    A Leader that ends without the answer request ends the workflow: no answer, E = 0 [D].
    """
    record = _Record()
    session = record.open()
    notes: list[tuple[str, str]] = []
    system, content = (Message("system", prompts.leader),), prompts.to_asked(question)
    while True:
        last = len(notes) + 1 == team.leader_turns or record.spent(team)
        if last:
            content += "\n" + prompts.ask_answer
        messages = (*system, Message("user", content))
        (turn,) = yield SampleRequest(Role.LEADER, session, messages, team.leader_tokens)
        record.input_tokens += turn.input_tokens
        reading = _read(Role.LEADER, turn, (roles.REQUEST_ANSWER,) if last else None)
        if not reading.chose(roles.TASK):
            break
        task = reading.action.body
        summary = yield from _search(task, team, prompts, record)
        notes.append((task, summary))
        system, content = (), prompts.from_searcher(len(notes), summary)
    record.close(Role.LEADER, session, reading)
    answers = ()
    if reading.chose(roles.REQUEST_ANSWER):
        answers = yield from _answer(question, notes, team, prompts, candidates, record)
    return record.outcome(answers)


def single(question: str, team: TeamConfig, prompts: Prompts, candidates: int) -> Steps:
    """One agent searches and answers in one conversation (Search-R1). `candidates` must be 1."""
    if candidates != 1:
        raise ValueError(f"The single agent answers once, found {candidates} candidates: ask for 1.")
    record = _Record()
    brief = _Brief(Role.AGENT, prompts.agent, roles.ANSWER, prompts.ask_final, question)
    reading = yield from _investigate(brief, prompts.to_asked(question), team, prompts, record)
    return record.outcome((reading.action.body if reading.action else "",))


WORKFLOWS: dict[Workflow, Callable[[str, TeamConfig, Prompts, int], Steps]] = {
    Workflow.CASCADE: cascade,
    Workflow.HIERARCHY: hierarchy,
    Workflow.SINGLE: single,
}


@dataclass(frozen=True)
class _Brief:
    """What makes a role that searches."""

    role: Role
    system: str
    closing: str
    """The tag that ends its work."""
    ask_closing: str
    """What it is told when no further search is possible."""
    task: str
    """What it is asked for."""


def _search(
    task: str, team: TeamConfig, prompts: Prompts, record: "_Record"
) -> Generator[Request, Reply, str]:
    """One Searcher session. Returns its summary, or the fixed no-result text if it gave none [D]."""
    brief = _Brief(Role.SEARCHER, prompts.searcher, roles.SUMMARY, prompts.ask_summary, task)
    reading = yield from _investigate(brief, prompts.to_searcher(task), team, prompts, record)
    return reading.action.body if reading.action else prompts.no_result


def _investigate(
    brief: _Brief, content: str, team: TeamConfig, prompts: Prompts, record: "_Record"
) -> Generator[Request, Reply, "_Reading"]:
    """One conversation with searches. Returns how its last turn reads."""
    session = record.open()
    searches = 0
    system, documents = (Message("system", brief.system),), ()
    while True:
        full = searches >= team.session_searches or record.searches >= team.workflow_searches
        last = full or record.spent(team)
        if last:
            content = f"{content}\n{brief.ask_closing}".strip()
        messages = (*system, Message("user", content, documents))
        (turn,) = yield SampleRequest(brief.role, session, messages, team.searcher_tokens)
        record.input_tokens += turn.input_tokens
        reading = _read(brief.role, turn, (brief.closing,) if last else None)
        if not reading.chose(roles.SEARCH):
            break
        documents = yield SearchRequest(reading.action.body)
        searches += 1
        record.searches += 1
        # An index without a match still answers: an empty frame, never a blank message.
        system, content = (), "" if documents else prompts.format_documents(())
    record.close(brief.role, session, reading, searches=searches, task=brief.task)
    return reading


def _answer(
    question: str,
    notes: Sequence[tuple[str, str]],
    team: TeamConfig,
    prompts: Prompts,
    candidates: int,
    record: "_Record",
) -> Generator[Request, Reply, tuple[str, ...]]:
    """One answer request. Returns one answer per candidate, "" for a candidate that gave none."""
    session = record.open()
    messages = (
        Message("system", prompts.answerer),
        Message("user", prompts.to_answerer(question, notes)),
    )
    turns = yield SampleRequest(Role.ANSWERER, session, messages, team.answerer_tokens, candidates)
    return tuple(
        record.close(Role.ANSWERER, session, _read(Role.ANSWERER, turn), candidate)
        for candidate, turn in enumerate(turns)
    )


@dataclass(frozen=True)
class _Reading:
    """What a turn says, and how its row stands after it."""

    status: Status
    action: Action | None = None
    reason: str = ""
    loose_answer: str = ""
    """What a single agent's turn holds of an answer although it is malformed."""

    def chose(self, tag: str) -> bool:
        return self.action is not None and self.action.tag == tag


def _read(role: Role, turn: Turn, allowed: tuple[str, ...] | None = None) -> _Reading:
    if turn.stop is Stop.CONTEXT:
        return _Reading(Status.CONTEXT)
    parsed = roles.parse(role, turn.text, allowed)
    if isinstance(parsed, Action):
        # The limit may fall on the action's last token: it is complete and counts.
        return _Reading(Status.FINISHED, parsed)
    if turn.stop is Stop.LENGTH and parsed.incomplete:
        return _Reading(Status.LENGTH)
    loose = roles.find_answer(turn.text) if role is Role.AGENT else ""
    return _Reading(Status.MALFORMED, reason=parsed.reason, loose_answer=loose)


@dataclass
class _Record:
    """What one workflow has done so far."""

    opened: int = 0
    searches: int = 0
    input_tokens: int = 0
    """Of the turns of Leader and Searchers."""
    sessions: list[Session] = field(default_factory=list)

    def spent(self, team: TeamConfig) -> bool:
        """Returns whether the workflow has read as many tokens as it may."""
        return 0 < team.workflow_input_tokens <= self.input_tokens

    def open(self) -> int:
        """Returns the number of a new session."""
        self.opened += 1
        return self.opened - 1

    def close(
        self,
        role: Role,
        session: int,
        reading: _Reading,
        candidate: int = 0,
        searches: int = 0,
        task: str = "",
    ) -> str:
        """Notes how a session ended; returns its closing body, "" where there is none."""
        body = reading.action.body if reading.action else reading.loose_answer
        self.sessions.append(
            Session(role, session, candidate, reading.status, searches, body, reading.reason, task)
        )
        return body

    def outcome(self, answers: tuple[str, ...]) -> Outcome:
        """Returns the outcome, its sessions in order of opening."""
        ordered = sorted(self.sessions, key=lambda closed: (closed.session, closed.candidate))
        return Outcome(tuple(ordered), answers, self.searches)
