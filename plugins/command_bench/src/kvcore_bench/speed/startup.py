"""Start-up: fresh processes with a warm file cache."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from kvcore_bench.speed.measure import Case, measure
from kvcore_bench.speed.rows import Row
from kvcore_bench.speed.setting import Setting

# Not ru_maxrss: a child inherits its parent's.
_TIMED = """
import time
begun = time.perf_counter()
{code}
seconds = time.perf_counter() - begun
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
import json, sys
sys.stderr.write(json.dumps([seconds, int(peak.split()[1]) / 1024]))
"""
_HELP = """
from contextlib import suppress
from kvcore.cli import main
with suppress(SystemExit):
    main(["--help"])
"""


def run(setting: Setting) -> list[Row]:
    """`import.*` is inside the interpreter; `cli.help.seconds` is the whole process, interpreter included."""
    memory: dict[str, float] = {}

    def inside(name: str, code: str) -> float:
        seconds, memory[name] = _timed(code)
        return seconds

    with setting.peer("startup") as peer:
        cases = [
            Case(
                "import.seconds", "s", partial(inside, "import", "import kvcore"), peer=peer.sampler("import.seconds")
            ),
            Case("import.rss", "MiB", lambda: memory["import"], partial(_rss, "pass"), peer.sampler("import.rss")),
            Case(
                "import.engine.seconds",
                "s",
                partial(inside, "engine", "import kvcore.engine"),
                peer=peer.sampler("import.engine.seconds"),
            ),
            Case("import.engine.rss", "MiB", lambda: memory["engine"], None, peer.sampler("import.engine.rss")),
            Case("cli.help.seconds", "s", _process(_HELP), _process("pass"), peer.sampler("cli.help.seconds")),
            Case("cli.help.rss", "MiB", partial(_rss, _HELP), peer=peer.sampler("cli.help.rss")),
        ]
        return measure(cases, 3 if setting.quick else 8)


def _timed(code: str) -> tuple[float, float]:
    done = subprocess.run(
        [sys.executable, "-c", _TIMED.format(code=code)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
    )
    seconds, mib = json.loads(done.stderr)
    return seconds, mib


def _rss(code: str) -> float:
    return _timed(code)[1]


def _process(code: str) -> Callable[[], float]:
    import time

    def sample() -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True)
        return time.perf_counter() - begun

    return sample
