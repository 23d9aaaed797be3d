"""How a program says no: in words and with exit code 2; a traceback is for bugs alone."""

import contextlib
import sys
from collections.abc import Iterator


class Refusal(ValueError):
    """What cannot be done: its message tells whoever started the program what to change."""


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Ends the program with exit code 2 and the words of a refusal on stderr; other errors pass through."""
    try:
        yield
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(2)
