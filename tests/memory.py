"""How much memory this process takes, from /proc."""

import re
import threading
import time
from pathlib import Path


def anonymous_bytes() -> int:
    """Returns this process' resident memory that no file backs."""
    return _status("RssAnon")


def resident_peak() -> int:
    """Returns the most resident memory this process has had, pages of mapped files included."""
    return _status("VmHWM")


def _status(field: str) -> int:
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


class Peak(threading.Thread):
    """Samples `anonymous_bytes` until it is told to stop."""

    def __init__(self):
        super().__init__(daemon=True)
        self._highest, self._stopping = 0, threading.Event()

    def run(self):
        while not self._stopping.is_set():
            self._highest = max(self._highest, anonymous_bytes())
            time.sleep(0.002)

    def stop(self) -> int:
        """Returns the highest value seen."""
        self._stopping.set()
        self.join()
        return max(self._highest, anonymous_bytes())
