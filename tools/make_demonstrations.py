"""Makes conversations for the supervised warm-up from questions, their answers and a corpus.

    python -m tools.make_demonstrations --questions nq.jsonl --questions hotpotqa.jsonl \\
        --corpus corpus.jsonl --out demonstrations.jsonl

A script plays the hierarchy on each question: the Leader delegates the whole question, the Searcher
searches for its content words (then for its names alone) until a document holds a gold answer and
reports the sentence, the Answerer gives the gold answer found there. The documents are what BM25
returns, prompts and grammar those of the workflow itself, at its default limits. Questions whose answer
is not found are left out and counted. The cascade needs no demonstrations of its own: its
Searcher and Answerer would see and say the same.
"""

import argparse
import collections
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from etils import epath

from mopd_jax.config import TeamConfig
from mopd_jax.data.answers import normalise
from mopd_jax.data.demonstrations import Conversation, act_out
from mopd_jax.data.questions import load_questions
from mopd_jax.data.recall import findable, holds
from mopd_jax.refusal import in_words
from mopd_jax.retrieval.bm25 import BM25Search
from mopd_jax.retrieval.search import Document, Retriever
from mopd_jax.team import roles
from mopd_jax.team.episode import Message, Question, Status
from mopd_jax.team.workflows import hierarchy

K = 3
"""Documents per search [P]."""

SUMMARY_WORDS = 40
"""Longest stretch of a document that is reported, the title not counted."""

FUNCTION_WORDS = frozenset(
    """
    a about after all also am an and any are as at be been before being between both but by can could did
    do does during each for from get gets give had has have he her him his how i if in into is it its many
    me most much my name named no not of off on one or our out over same say she should since so some such
    than that the their them then there these they this those through to up us was we were what what's when
    where which while who who's whom whose why will with would you your
    """.split()
)
"""Words of a question that say nothing about what to look for."""

REPEATED = "skipped: question already read"
NOT_FINDABLE = "skipped: answer is yes, no or nothing"
NOT_RETRIEVED = "skipped: answer not in the documents found"
NOT_PARSED = "skipped: tag of the team's language in question or passage"


@dataclass(frozen=True)
class Finding:
    """Where an answer was found."""

    queries: tuple[str, ...]
    """Searches up to and including the one that found it."""
    gold: str
    summary: str


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` defaults to the process' own arguments."""
    args = _parse(argv)
    _check(args)
    start = time.time()
    questions, counts = read_questions(args.questions)
    retriever = BM25Search(args.corpus)
    unfinished = epath.Path(f"{args.out}.tmp")
    with unfinished.open("w") as out:
        for index in np.random.default_rng(args.seed).permutation(len(questions)):
            if args.limit and counts["demonstrated"] == args.limit:
                break
            made = demonstrate(questions[index], retriever)
            if isinstance(made, str):
                counts[made] += 1
            else:
                counts["demonstrated"] += 1
                out.writelines(json.dumps(as_json(conversation)) + "\n" for conversation in made)
    if not counts["demonstrated"]:
        unfinished.unlink()
        reasons = ", ".join(f"{count:,d} {name}" for name, count in counts.items() if count)
        raise SystemExit(f"No question could be demonstrated, {args.out} is not written: {reasons}.")
    unfinished.replace(args.out)
    print(f"{args.out}: {3 * counts['demonstrated']} conversations, {time.time() - start:.0f} s")
    for name, count in counts.items():
        print(f"{count:8,d}  {name}")


def _check(args: argparse.Namespace) -> None:
    """Refuses what would lose a file, or a place where nothing can be written."""
    out = epath.Path(args.out)
    if args.out in (args.corpus, *args.questions):
        raise SystemExit(f"--out {args.out} is one of the files to read: name another one.")
    if out.is_dir():
        raise SystemExit(f"--out {args.out} is a folder, expected a file to write.")
    if args.limit < 0:
        raise SystemExit(f"--limit {args.limit}: expected a number of questions, or 0 for all.")
    out.parent.mkdir(parents=True, exist_ok=True)


def read_questions(paths: Sequence[str]) -> tuple[list[Question], collections.Counter]:
    """Returns the questions of all files, each (dataset, split, id) once, and the counts for the report."""
    questions = {}
    counts = collections.Counter({"read": 0, "demonstrated": 0})
    for path in paths:
        for question in load_questions(path):
            key = question.dataset, question.split, question.id
            counts["read"] += 1
            counts[REPEATED] += key in questions
            questions.setdefault(key, question)
    return list(questions.values()), counts


def demonstrate(question: Question, retriever: Retriever) -> list[Conversation] | str:
    """Returns the conversations of all three roles on a question, or the reason why there are none."""
    if not findable(question.answers):
        return NOT_FINDABLE
    finding = look_up(question, retriever)
    if finding is None:
        return NOT_RETRIEVED
    script = [
        _action(roles.TASK, question.text),
        *(_action(roles.SEARCH, query) for query in finding.queries),
        _action(roles.SUMMARY, finding.summary),
        _action(roles.REQUEST_ANSWER, ""),
        _action(roles.ANSWER, finding.gold),
    ]
    steps = hierarchy(question.text, TeamConfig(), roles.Prompts(), candidates=1)
    turns = iter(script)
    conversations, outcome = act_out(steps, lambda _: next(turns), retriever, K)
    finished = all(session.status is Status.FINISHED for session in outcome.sessions)
    return conversations if finished and outcome.answers == (finding.gold,) else NOT_PARSED


def look_up(question: Question, retriever: Retriever) -> Finding | None:
    """Returns what the first successful wording of the question finds, None if none does."""
    wordings = queries(question.text)
    for number, query in enumerate(wordings, 1):
        (documents,) = retriever.search([query], K)
        if evidence := find_evidence(question.answers, documents):
            return Finding(tuple(wordings[:number]), *evidence)
    return None


def queries(text: str) -> list[str]:
    """Returns the wordings in which a question is searched for: its content words, then its names alone."""
    words = re.findall(r"[^\W_]+(?:['’.-][^\W_]+)*", text)
    content = [word for word in words if word.lower() not in FUNCTION_WORDS] or words
    names = [word for word in content if not word[0].islower()]
    return [query for query in dict.fromkeys((" ".join(content), " ".join(names))) if query]


def find_evidence(golds: Sequence[str], documents: Sequence[Document]) -> tuple[str, str] | None:
    """Returns a gold answer and a summary that holds it, from the best document that does, else None."""
    wanted = findable(golds)
    for document in documents:
        text = normalise(document.contents)
        for gold, words in wanted.items():
            if holds(text, words) and (summary := _report(document, words)):
                return gold, summary
    return None


def as_json(conversation: Conversation) -> dict:
    """Returns a conversation in the form that `data.demonstrations.read_conversations` reads."""
    return {"role": conversation.role.value, "messages": [_message(m) for m in conversation.messages]}


def _message(message: Message | str) -> dict:
    if isinstance(message, str):
        return {"role": "assistant", "content": message}
    documents = [{"id": d.id, "contents": d.contents} for d in message.documents]
    return {"role": message.role, "content": message.content} | (
        {"documents": documents} if documents else {}
    )


def _action(tag: str, body: str) -> str:
    return f"<{tag}>{body}</{tag}>"


def _report(document: Document, words: str) -> str:
    """Returns the title and the first sentence that holds the words, "" if they are more than is reported.

    Where no sentence does, the whole text is tried, then its beginning: the title holds them.
    """
    passages = [*re.split(r"(?<=[.!?])\s+", document.text), document.text]
    stretches = (stretch for passage in passages for stretch in _stretches(passage.split()))
    beginning = next(_stretches(document.text.split()))
    found = next((s for s in stretches if holds(normalise(s), words)), beginning)
    title = document.title.strip().strip('"')
    report = found if found.startswith(title) else f"{title}: {found}"
    return report if holds(normalise(report), words) else ""


def _stretches(words: list[str]) -> Iterator[str]:
    """Yields all runs of SUMMARY_WORDS words, or the words themselves if they are fewer."""
    for start in range(max(1, len(words) - SUMMARY_WORDS + 1)):
        yield " ".join(words[start : start + SUMMARY_WORDS])


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--questions",
        action="append",
        required=True,
        help="FlashRAG question file; may be given several times",
    )
    add("--corpus", required=True, help='passages, {"id", "contents"} JSONL')
    add("--out", required=True, help="file to write, one conversation per line")
    add("--limit", type=int, default=0, help="questions to demonstrate at most; 0: all")
    add("--seed", type=int, default=0, help="seed of the order in which questions are taken")
    return parser.parse_args(argv)


if __name__ == "__main__":
    with in_words():
        main()
