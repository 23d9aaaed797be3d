"""Demonstrations of the embedded world: scripted experts act in the real workflows.

The experts read their facts in the documents that the search returns, and each batch is played in a
world of its own with new names and facts: there is nothing to memorise but how to look things up, and
no demonstration can tell anything about the world that is evaluated.
"""

import dataclasses
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

import numpy as np

from mopd_jax.config import TeamConfig, Workflow
from mopd_jax.data import miniature
from mopd_jax.data.demonstrations import Conversation, act_out
from mopd_jax.data.miniature import UNKNOWN, World, chain_text, parse_chain
from mopd_jax.retrieval.miniature import MiniatureSearch
from mopd_jax.retrieval.search import Document, Retriever
from mopd_jax.team.episode import Message, Outcome, Role, SampleRequest
from mopd_jax.team.workflows import WORKFLOWS, Steps


@dataclass(frozen=True)
class Noise:
    """How imperfect the experts are: probabilities, each drawn where its decision is taken [D]."""

    skip: float = 0.0
    """A Searcher reports "unknown" without any search."""
    vague: float = 0.0
    """A query names the subject only."""
    impatient: float = 0.0
    """A Searcher reports "unknown" after a search without success instead of asking in other words."""
    short: float = 0.0
    """A Searcher asked for a two-fact chain reports the first fact's value."""
    malformed: float = 0.0
    """A Searcher's turn breaks the grammar."""
    hasty: float = 0.0
    """The Leader asks for the answer after a sub-task although more are needed."""
    careful: float = 0.0
    """The Leader has the last fact looked up once more although it was found, again and again."""
    mistaken: float = 0.0
    """The Answerer names something else."""


STREAMS = {
    "facts": Noise(careful=0.4),
    "noisy": Noise(
        skip=0.25,
        vague=0.2,
        impatient=0.6,
        short=0.4,
        malformed=0.05,
        hasty=0.15,
        careful=0.2,
        mistaken=0.05,
    ),
}
"""What the streams of the warm-up are made of: look-ups without a mistake, then what makes the base policy as
weak as it should be. Facts looked up twice are in both: a Leader that wants more searches has a use for
them."""

WITH_AGENT = "+agent"
"""After a stream's name: the single agent is demonstrated as well as the two teams."""

K = 3
"""Documents per search [P]."""

Expert = Generator[str, Message, None]
"""One role in one conversation: yields its turns, is resumed with what the environment says."""


class Demonstrations:
    """An endless stream of conversations, as a stateless function of the step."""

    def __init__(self, stream: str, team: TeamConfig, seed: int):
        """Takes a name from `STREAMS`, with `WITH_AGENT` or not, and the limits of the workflows that are to
        be demonstrated.

        Raises:
          ValueError: another stream.
        """
        name = stream.removesuffix(WITH_AGENT)
        if name not in STREAMS:
            raise ValueError(f"Found demonstrations {stream!r}, expected one of {list(STREAMS)}.")
        workflows = [Workflow.CASCADE, Workflow.HIERARCHY] + [Workflow.SINGLE] * (name != stream)
        self._noise = STREAMS[name]
        self._teams = [dataclasses.replace(team, workflow=workflow) for workflow in workflows]
        self._seed = [seed, list(STREAMS).index(name)]

    def batch(self, step: int, count: int) -> list[Conversation]:
        """Returns `count` conversations of all roles, the workflows by turns."""
        rng = np.random.default_rng([*self._seed, step])
        world = World(int(rng.integers(2**63)))
        retriever = MiniatureSearch(world.passages)
        conversations: list[Conversation] = []
        # The splits of a world of its own are all alike; this one is the smallest.
        for i, question in enumerate(world.questions("validation")):
            if len(conversations) >= count:
                break
            team = self._teams[i % len(self._teams)]
            steps = WORKFLOWS[team.workflow](question.text, team, miniature.PROMPTS, 1)
            conversations += play(steps, team, retriever, self._noise, rng)[0]
        return conversations[:count]


def play(
    steps: Steps, team: TeamConfig, retriever: Retriever, noise: Noise, rng: np.random.Generator
) -> tuple[list[Conversation], Outcome]:
    """Runs one workflow with experts in all roles. Returns their conversations, in order of opening,
    and the workflow's outcome."""
    experts: dict[int, Expert] = {}

    def speak(request: SampleRequest) -> str:
        *_, message = request.messages
        if request.session in experts:
            return experts[request.session].send(message)
        experts[request.session] = EXPERTS[request.role](message, team, noise, rng)
        return next(experts[request.session])

    return act_out(steps, speak, retriever, K)


def _leader(message: Message, team: TeamConfig, noise: Noise, rng: np.random.Generator) -> Expert:
    """Asks for one fact after the other; a fact that was not found is asked for again."""
    subject, relations = parse_chain(message.content)
    remaining = list(relations)
    for _ in range(team.leader_turns - 1):
        if remaining:
            task = chain_text(subject, remaining[:1])
        elif rng.random() >= noise.careful:
            break
        message = yield f"<task>{task}</task>"
        found = re.search(r">(.*)</result>", message.content)[1]
        if remaining and found != UNKNOWN:
            remaining.pop(0)
            subject = found
        if rng.random() < noise.hasty:
            break
    yield "<request_answer></request_answer>"


def _searcher(message: Message, team: TeamConfig, noise: Noise, rng: np.random.Generator) -> Expert:
    """Looks one fact up after the other, each in up to three wordings, and reports the last value.

    After each search it first notes what it has read, e.g. "novel Moonlight" or "novel unknown".
    """
    subject, relations = parse_chain(message.content)
    if rng.random() < noise.skip:
        yield f"<summary>{UNKNOWN}</summary>"
        return
    if len(relations) > 1 and rng.random() < noise.short:
        relations = relations[:1]
    seen, value = yield from _look_up(subject, relations, team, noise, rng)
    yield f"{seen}<summary>{value or UNKNOWN}</summary>"


def _agent(message: Message, team: TeamConfig, noise: Noise, rng: np.random.Generator) -> Expert:
    """Searches as a Searcher does, then answers itself: with the last value, or with a guess."""
    subject, relations = parse_chain(message.content)
    seen, value = "", None
    if rng.random() >= noise.skip:
        asked = relations[:1] if len(relations) > 1 and rng.random() < noise.short else relations
        seen, value = yield from _look_up(subject, asked, team, noise, rng)
    guessing = value is None or rng.random() < noise.mistaken
    yield f"{seen}<answer>{_guess(relations[-1], rng) if guessing else value}</answer>"


def _look_up(
    subject: str, relations: tuple[str, ...], team: TeamConfig, noise: Noise, rng: np.random.Generator
) -> Generator[str, Message, tuple[str, str | None]]:
    """Returns what is noted of the last search, and the last value, None if it was not found."""
    left, seen = team.session_searches, ""
    for relation in relations:
        value = None
        for form in miniature.QUERY_FORMS[:left]:
            query = form.format(subject=subject, relation=relation)
            if rng.random() < noise.vague:
                query = subject
            if rng.random() < noise.malformed:
                yield f"{seen}<search>{query}"
            message = yield f"{seen}<search>{query}</search>"
            left -= 1
            value = _read(message.documents, subject, relation)
            seen = f"{relation} {value or UNKNOWN} "
            if value or rng.random() < noise.impatient:
                break
        if value is None:
            break
        subject = value
    return seen, value


def _answerer(message: Message, team: TeamConfig, noise: Noise, rng: np.random.Generator) -> Expert:
    """Gives the last thing that was found."""
    del team
    question, *notes = message.content.split("Task ")
    _, relations = parse_chain(question)
    results = [note.strip().partition(" Result: ")[2] for note in notes]
    found = [result for result in results if result != UNKNOWN]
    guessing = not found or rng.random() < noise.mistaken
    yield f"<answer>{_guess(relations[-1], rng) if guessing else found[-1]}</answer>"


EXPERTS: dict[Role, Callable[[Message, TeamConfig, Noise, np.random.Generator], Expert]] = {
    Role.LEADER: _leader,
    Role.SEARCHER: _searcher,
    Role.ANSWERER: _answerer,
    Role.AGENT: _agent,
}


def _read(documents: tuple[Document, ...], subject: str, relation: str) -> str | None:
    """Returns the value that a document about the subject states, None if none does."""
    stated = [re.search(rf"\b{relation} (\w+)", d.text) for d in documents if d.title == subject]
    return next((match[1] for match in stated if match), None)


def _guess(relation: str, rng: np.random.Generator) -> str:
    """Returns anything of the right kind."""
    names = miniature.names_for(relation)
    return names[rng.integers(len(names))]
