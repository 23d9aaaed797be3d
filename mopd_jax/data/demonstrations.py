"""Conversations to imitate: what the supervised warm-up reads, from a user's file or a generator."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from mopd_jax.refusal import Refusal
from mopd_jax.retrieval.jsonl import id_field, read_jsonl, text_field
from mopd_jax.retrieval.search import Document, Retriever
from mopd_jax.team.episode import Message, Outcome, Role, SampleRequest, SearchRequest, Stop, Turn
from mopd_jax.team.roles import ACTIONS
from mopd_jax.team.workflows import Steps


@dataclass(frozen=True)
class Conversation:
    """One role's conversation: what the environment said, and the turns that are to be learnt."""

    role: Role
    messages: tuple[Message | str, ...]
    """Environment messages and, as plain strings, the assistant's turns; the last one is a turn."""


class FileDemonstrations:
    """Shuffled conversations as a stateless function of the step: each epoch has its own order."""

    def __init__(self, conversations: Sequence[Conversation], seed: int):
        """Takes at least one conversation.

        Raises:
          Refusal: there is none.
        """
        if not conversations:
            raise Refusal("Found no demonstrations, expected at least one conversation.")
        self.conversations = conversations
        self._seed = seed

    def batch(self, step: int, count: int) -> list[Conversation]:
        """Returns the `count` conversations of a step. An epoch's end may fall inside a batch."""
        size = len(self.conversations)
        positions = range(step * count, (step + 1) * count)
        orders = {
            epoch: np.random.default_rng([self._seed, epoch]).permutation(size)
            for epoch in {position // size for position in positions}
        }
        return [self.conversations[orders[p // size][p % size]] for p in positions]


def act_out(
    steps: Steps, speak: Callable[[SampleRequest], str], retriever: Retriever, k: int
) -> tuple[list[Conversation], Outcome]:
    """Runs a workflow in which every turn is what `speak` says, and every search finds `k` documents.

    Returns its conversations, in order of opening, and its outcome.
    """
    logs: dict[int, tuple[Role, list[Message | str]]] = {}
    reply = None
    while True:
        try:
            request = steps.send(reply)
        except StopIteration as end:
            return [Conversation(role, tuple(log)) for role, log in logs.values()], end.value
        if isinstance(request, SearchRequest):
            (reply,) = retriever.search([request.query], k)
        else:
            _, log = logs.setdefault(request.session, (request.role, []))
            turn = speak(request)
            log += [*request.messages, turn]
            reply = (Turn(turn, Stop.END),) * request.candidates


def read_conversations(path: epath.PathLike) -> list[Conversation]:
    """Returns the conversations of a JSON Lines file, one per line:

    `{"role": "searcher", "messages": [{"role": "system"|"user"|"assistant", "content": "…"}, …]}`

    The first message may be a system message; then user and assistant take turns, the assistant last.
    A user message may carry `"documents": [{"id", "contents"}, …]`; they are framed and shortened as in
    a rollout.

    Raises:
      Refusal: names the file, the line, what was found and what was expected.
    """
    return [_conversation(record, where) for where, record in read_jsonl(path)]


def _conversation(record: dict[str, Any], where: str) -> Conversation:
    if set(record) != {"role", "messages"}:
        raise Refusal(f"{where}: found fields {list(record)}, expected 'role' and 'messages'.")
    roles = [role.value for role in ACTIONS]
    if record["role"] not in roles:
        raise Refusal(f"{where}: found role {record['role']!r}, expected one of {roles}.")
    _check_order(record["messages"], where)
    return Conversation(Role(record["role"]), tuple(_message(m, where) for m in record["messages"]))


def _check_order(messages: Any, where: str):
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise Refusal(f"{where}: found messages {_short(messages)}, expected a list of objects.")
    found = [m.get("role") for m in messages]
    turns = found[1:] if found[:1] == ["system"] else found
    if not turns or turns != ["user", "assistant"] * (len(turns) // 2):
        raise Refusal(
            f"{where}: found messages of {found}, expected an optional system message, then user and "
            "assistant by turns, the assistant last."
        )


def _message(message: dict[str, Any], where: str) -> Message | str:
    content = message.get("content")
    known = {"role", "content"} | ({"documents"} if message["role"] == "user" else set())
    if not isinstance(content, str) or not set(message) <= known:
        raise Refusal(
            f"{where}: found a message {_short(message)}, expected a text as content and no fields "
            f"but {sorted(known)}."
        )
    if message["role"] == "assistant":
        return content
    return Message(message["role"], content, _documents(message.get("documents", []), where))


def _documents(found: Any, where: str) -> tuple[Document, ...]:
    names = {"id", "contents"}
    if not isinstance(found, list) or not all(isinstance(d, dict) and set(d) == names for d in found):
        raise Refusal(f'{where}: found documents {_short(found)}, expected [{{"id", "contents"}}, …].')
    return tuple(Document(id_field(d, where), text_field(d, "contents", where)) for d in found)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:80] + "…"
