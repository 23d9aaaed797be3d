"""An environment of its own for Tunix, which needs other versions than ours: 1.6 GB, made once."""

import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENT = "google-tunix==0.1.7"


def python(folder: Path) -> str:
    """Returns the interpreter of the environment in `folder`, which is made if it is not there."""
    environment = folder / "tunix"
    interpreter, done = environment / "bin" / "python", environment / "installed"
    if not done.exists():
        print(f"Installing {REQUIREMENT} into {environment} (1.6 GB).", file=sys.stderr, flush=True)
        venv.create(environment, clear=True, with_pip=True)
        subprocess.run(
            [interpreter, "-m", "pip", "install", "--quiet", REQUIREMENT], check=True, stdout=sys.stderr
        )
        done.touch()
    return str(interpreter)
