"""The embedded world: invented people, places and works, questions about them, a word vocabulary.

Nothing is downloaded and everything follows from a seed. Each relation of the world is a permutation
(nobody's friend is anybody else's, no two people were born in one place), so every answer is equally
frequent and guessing does not pay. A name is one word, and one token.
"""

import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mopd_jax.team.episode import Question
from mopd_jax.team.roles import TAGS, Prompts

PEOPLE = (
    "Ada Agnes Albert Alma Amos Anna Anton Arthur Astrid August Bella Bernard Bertha Boris Bruno Carl Cecil "
    "Clara Conrad Cora Daniel Daphne David Dora Dorothy Edgar Edith Elias Ella Elmer Elsa Emil Emma Ernest "
    "Esther Eugene Eva Felix Fiona Flora Frank Frida Gabriel Georg Gloria Grace Greta Gustav Hannah Harold "
    "Hazel Helen Henry Herman Hilda Homer Hugo Ida Igor Ines Irene Iris Isaac Ivan Ivy Jacob James Jasper "
    "Joan Jonas Joseph Judith Julia Julius Karin Klaus Lara Laura Leo Leonard Lewis Lilian Lina Louis Lucy "
    "Luther Mabel Magnus Marcus Martha Martin Mathilda Max Mildred Miriam Morris Nadia Nathan Nora Norman "
    "Olga Olive Oscar Otto Pauline Peter Philip Quentin Rachel Ralph Rosa Rufus Ruth Samuel Selma Silas "
    "Simon Stella Sylvia Theodor"
).split()
PLACES = [
    first + second
    for first in "Alder Ash Birch Brook Cedar Clear Elm Fair Green High Long Oak".split()
    for second in "bridge dale field ford gate haven hill mouth ton wood".split()
]
WORKS = [
    first + second
    for first in "Bright Dark Dream Ember Frost Ghost Gold Iron Moon Night Silver Storm".split()
    for second in "bell dance fall flower heart light rain road song star".split()
]
TO_PEOPLE = ("friend", "teacher", "doctor", "boss", "neighbor", "rival")
TO_PLACES = ("birthplace", "hometown", "office")
TO_WORKS = ("novel", "song", "painting")
RELATIONS = TO_PEOPLE + TO_PLACES + TO_WORKS

QUESTION_FORMS = ("What is {}?", "Name {}.", "Please tell me {}.")
QUERY_FORMS = ("{subject}'s {relation}", "{relation} of {subject}", "the {relation} of {subject}")
"""Ways to ask for one fact, in the order in which an expert tries them."""
PROMPTS = Prompts(
    leader="You lead.",
    searcher="You search.",
    answerer="You answer.",
    agent="You search. You answer.",
    question="Question: {question}",
    ask_answer="Request the answer.",
    ask_summary="Report now.",
    ask_final="You answer now.",
    no_result="unknown",
    notes="Question: {question} {notes}",
    note="Task {number}: {task} Result: {summary}",
)
"""What the small model is told: the full team's prompts in a few words."""
UNKNOWN = PROMPTS.no_result
"""How a report says that a fact was not found."""

SPLITS = {"train": 80, "validation": 10, "test": 30}
"""People about whom each split asks. The second fact of a question may be about anybody."""
TWO_HOP = 28
"""Two-fact questions per person, of 72; with the 12 one-fact questions 70 % of all."""


class World:
    """People, their facts, the passages that state them and the questions about them."""

    people: tuple[str, ...]
    """Names, in random order: the subjects of `SPLITS` one after the other."""
    facts: dict[tuple[str, str], str]
    """(subject, relation) → value."""
    passages: list[dict[str, str]]
    """`{"id", "contents"}`: the subject's name as title line, then two of its facts, e.g. "boss Karin; song
    Moonlight". A search also meets distractors: the subject's other facts, and people to whom the subject
    is something."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self._seed = seed
        self.people = tuple(_shuffled(PEOPLE, rng))
        ranges = {**dict.fromkeys(TO_PLACES, PLACES), **dict.fromkeys(TO_WORKS, WORKS)}
        self.facts = {}
        for relation in RELATIONS:
            values = _shuffled(ranges[relation], rng) if relation in ranges else _assigned(self.people, rng)
            self.facts |= {(person, relation): v for person, v in zip(self.people, values, strict=True)}
        self.passages = _passages(self.people, self.facts, rng)

    def answer(self, subject: str, relations: tuple[str, ...]) -> str:
        """Returns the end of a chain of facts, e.g. of ("Ada", ("friend", "novel"))."""
        for relation in relations:
            subject = self.facts[subject, relation]
        return subject

    def questions(self, split: str) -> list[Question]:
        """Returns the questions of "train", "validation" or "test" (3,200, 400 and 1,200) in a fixed
        random order, so that any leading part is a fair sample. No two splits ask about one person.

        Raises:
          ValueError: another split.
        """
        if split not in SPLITS:
            raise ValueError(f"Found split {split!r} of the embedded world, expected one of {list(SPLITS)}.")
        names = list(SPLITS)
        start = sum(SPLITS[name] for name in names[: names.index(split)])
        rng = np.random.default_rng([self._seed, names.index(split)])
        subjects = self.people[start : start + SPLITS[split]]
        chains = _shuffled([chain for s in subjects for chain in self._chains(s, rng)], rng)
        forms = rng.choice(QUESTION_FORMS, len(chains))
        return [
            Question(
                dataset="miniature",
                split=split,
                id=str(i),
                text=form.format(chain_text(*chain)),
                answers=(self.answer(*chain),),
            )
            for i, (chain, form) in enumerate(zip(chains, forms, strict=True))
        ]

    def _chains(self, subject: str, rng: np.random.Generator) -> Iterator[tuple[str, tuple[str, ...]]]:
        pairs = [p for p in itertools.product(TO_PEOPLE, RELATIONS) if self.answer(subject, p) != subject]
        chosen = rng.choice(len(pairs), TWO_HOP, replace=False)
        yield from ((subject, (relation,)) for relation in RELATIONS)
        yield from ((subject, pairs[i]) for i in chosen)


def names_for(relation: str) -> Sequence[str]:
    """Returns the names among which a fact's value lies: people's, places' or works'."""
    if relation in TO_PEOPLE:
        return PEOPLE
    return PLACES if relation in TO_PLACES else WORKS


def chain_text(subject: str, relations: tuple[str, ...]) -> str:
    """Returns e.g. "Ada's friend's novel"; questions, sub-tasks and queries are made of it."""
    return "'s ".join((subject, *relations))


def parse_chain(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the (subject, relations) of which a question or a sub-task speaks: `chain_text` read back."""
    (_, subject), *relations = re.findall(r"'s (\w+)|(\w+)(?='s)", text)
    return subject, tuple(relation for relation, _ in relations)


# One piece, one token: a tag, the start of a document's frame, the possessive, a word, a sign.
_PIECE = r"""</?\w+(?: task="\d")?>|Doc \d\(Title:|'s\b|\w+|[^\w\s]"""
_SPECIAL = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> list[str]:
    """Returns every word of the world's texts, prompts and actions, sorted."""
    names = [*PEOPLE, *PLACES, *WORKS]
    numbers = range(1, 10)
    prompts = [
        *(PROMPTS.leader, PROMPTS.searcher, PROMPTS.answerer, PROMPTS.ask_answer, PROMPTS.ask_summary),
        *(PROMPTS.to_asked(""), PROMPTS.to_searcher(""), PROMPTS.to_answerer("", [("", "")])),
        *(PROMPTS.from_searcher(n, UNKNOWN) for n in numbers),
        PROMPTS.format_documents([("", "")] * 5),
    ]
    tags = [f"<{tag}></{tag}>" for tag in TAGS]
    forms = [*QUESTION_FORMS, *QUERY_FORMS, ";", *map(str, numbers), "system user assistant"]
    texts = [*names, *RELATIONS, *prompts, *tags, *forms]
    return sorted({piece for text in texts for piece in re.findall(_PIECE, re.sub(r"{\w*}", " ", text))})


def vocabulary_size() -> int:
    """Returns the number of ids of the world's tokenizer: the words, one for any other, special tokens."""
    return len(vocabulary()) + 1 + len(_SPECIAL)


def save_tokenizer(folder: epath.PathLike):
    """Writes the world's tokenizer into an existing folder, in Hugging Face's files: one token per word,
    Qwen's chat template, stop and padding ids in `generation_config.json`."""
    words = {word: i for i, word in enumerate(["<unk>", *vocabulary()])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", chat_template=_TEMPLATE, **_SPECIAL
    )
    with tempfile.TemporaryDirectory() as local:  # transformers writes no gs:// paths
        tokenizer.save_pretrained(local)
        for file in epath.Path(local).iterdir():
            (epath.Path(folder) / file.name).write_bytes(file.read_bytes())
    stops = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (epath.Path(folder) / "generation_config.json").write_text(json.dumps(stops, indent=2))


def _shuffled(items, rng: np.random.Generator) -> list:
    return [items[i] for i in rng.permutation(len(items))]


def _assigned(people: tuple[str, ...], rng: np.random.Generator) -> list[str]:
    """Returns somebody else for each person, each once: the next in a random circle."""
    circle = _shuffled(people, rng)
    following = dict(zip(circle, circle[1:] + circle[:1], strict=True))
    return [following[person] for person in people]


def _passages(people, facts, rng: np.random.Generator) -> list[dict[str, str]]:
    passages = []
    for person in people:
        relations = _shuffled(RELATIONS, rng)
        for pair in zip(relations[::2], relations[1::2], strict=True):
            text = "; ".join(f"{relation} {facts[person, relation]}" for relation in pair)
            passages.append({"id": str(len(passages)), "contents": f"{person}\n{text}"})
    return passages
