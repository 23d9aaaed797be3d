"""Qwen3's own chat templates: ids of whole conversations, as transformers renders them, are kept in a file.

The templates themselves are read from the package `trl`, which carries them as published (Apache-2.0), where
that is installed (`pip install --no-deps trl`). `python -m tests.test_template` writes the file again.
"""

import hashlib
import importlib.util
import json
import pathlib
import tempfile

import pytest
from transformers import AutoTokenizer

from mopd_jax.model.tokens import Tokens, check_compatible
from mopd_jax.team.episode import Message
from tests.conversations import CONVERSATIONS, render, template_ids
from tests.fixtures import GOLDEN, write_qwen_tokenizer

TEMPLATES = ("qwen3_instruct_2507", "qwen3")
"""Of Qwen3-4B-Instruct-2507, and of the hybrid Qwen3-0.6B, 1.7B, 4B and 8B."""
STORED = GOLDEN / "chat_ids.json"


def published(name: str) -> str:
    """Returns a template's text."""
    package = importlib.util.find_spec("trl")
    for folder in package.submodule_search_locations if package else []:
        path = pathlib.Path(folder) / "chat_templates" / f"{name}.jinja"
        if path.exists():
            return path.read_text()
    pytest.skip(f"the package trl, with chat_templates/{name}.jinja, is not installed")


def with_template(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Writes a tokenizer folder of the real vocabulary and a published template."""
    write_qwen_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": published(name)}))
    return folder


def compute(name: str) -> dict:
    """Returns what is stored of a template: its hash, and the ids of each conversation."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(with_template(pathlib.Path(folder), name))
    ids = {conversation: template_ids(tokenizer, chat) for conversation, chat in CONVERSATIONS.items()}
    return {"sha256": hashlib.sha256(published(name).encode()).hexdigest(), "ids": ids}


def write_golden() -> None:
    STORED.write_text(json.dumps({name: compute(name) for name in TEMPLATES}) + "\n")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Tokens:
    """The real vocabulary with this project's own template."""
    return Tokens.from_folder(write_qwen_tokenizer(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(params=TEMPLATES)
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_conversations_have_the_ids_of_the_published_template(qwen, name, conversation):
    """Kind 2."""
    expected = json.loads(STORED.read_text())[name]["ids"][conversation]
    assert render(qwen, CONVERSATIONS[conversation]) == expected
    assert expected.count(qwen.end_of_turn_id) == len(CONVERSATIONS[conversation])


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_every_prompt_is_a_beginning_of_the_published_rendering(qwen, name, conversation):
    """Kind 2. Nothing that was read or sampled moves, and no think block enters the history."""
    expected = json.loads(STORED.read_text())[name]["ids"][conversation]
    chat = CONVERSATIONS[conversation]
    start = 2 if chat[0][0] == "system" else 1
    for end in range(start, len(chat) + 1, 2):
        prompt = render(qwen, chat[:end])
        assert expected[: len(prompt)] == prompt
    assert not {151_667, 151_668} & set(expected), "<think>, </think>"


def test_published_template_renders_as_stored(name):
    assert compute(name) == json.loads(STORED.read_text())[name]


def test_published_template_is_taken_as_it_is(qwen, name, tmp_path):
    """It is append-only, and a checkpoint that carries it can teach one with this project's template."""
    tokens = Tokens.from_folder(with_template(tmp_path, name))
    check_compatible(qwen, tokens, 151_936, 151_936)
    for conversation, chat in CONVERSATIONS.items():
        assert render(tokens, chat) == render(qwen, chat), conversation
    assert tokens.open([Message("user", "Hi")])[-3:] == [151_644, 77_091, 198]


if __name__ == "__main__":
    write_golden()
