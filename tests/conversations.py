"""Conversations of each role, their ids as the rollout builds them, and as a chat template renders them."""

from mopd_jax.model.tokens import Tokens
from mopd_jax.team.episode import Message

CONVERSATIONS = {
    "leader": [
        ("system", "You lead a team.\n\nUse <task>…</task>.\n"),
        ("user", "Who directed “Amélie”, and when was he born?"),
        ("assistant", "First the film.\n<task>Who directed Amélie?</task>"),
        ("user", '<result task="1">Jean-Pierre Jeunet (born 3 September 1953)</result>'),
        ("assistant", "<request_answer></request_answer>"),
        ("user", "Answer, please."),
    ],
    "searcher": [
        ("system", "You search."),
        ("user", "\n Task: 12345 東京  \n"),
        ("assistant", "<search>東京 12345</search>"),
        ("user", '<documents>\nDoc 1(Title: "A") it\'s 3.14 — naïve\r\n\n\tcode\n</documents>'),
        ("assistant", "<summary>none\n\n</summary>"),
        ("user", " "),
    ],
    "answerer": [("system", "You answer."), ("user", "Question: who?\nNotes:\n1. a\n2. b")],
    "without system": [("user", "Hi"), ("assistant", "Hello"), ("user", "'ll\n\n you?")],
    "many turns": [
        ("system", "You search until you know."),
        ("user", "Task: where was the director of Amélie born?"),
        *(
            message
            for turn in range(12)
            for message in (
                ("assistant", f"Not yet ({turn}).\n\n<search>Jeunet, born {turn}</search>"),
                ("user", f"<documents>\nDoc {turn}(Title: Roanne) A town.\n</documents>\n"),
            )
        ),
    ],
}
"""Role → (role of the message, content), as the team's conversations go."""


def render(tokens: Tokens, chat: list[tuple[str, str]]) -> list[int]:
    """The ids of a conversation as the rollout builds them: nothing but appending."""
    start = 2 if chat[0][0] == "system" else 1
    ids = tokens.open([Message(role, content) for role, content in chat[:start]])
    for (_, answer), (_, content) in zip(chat[start::2], chat[start + 1 :: 2], strict=True):
        ids += [*tokens.encode(answer), tokens.end_of_turn_id, *tokens.reply(content, closed=True)]
    return ids


def template_ids(tokenizer, chat: list[tuple[str, str]]) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in chat]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
