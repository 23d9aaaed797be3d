"""Configuration of the policy whose episodes are recorded: the imitation phases of `configs/mini.py`."""

from dataclasses import dataclass, field

from configs.mini import facts, imitation
from mopd_jax.config import Chain, Config


@dataclass
class Policy(Chain):
    """Look-ups first, then demonstrations with mistakes in them."""

    facts: Config = field(default_factory=facts)
    warmup: Config = field(default_factory=lambda: imitation("noisy", "facts", 110))


def get_config() -> Policy:
    return Policy()
