"""Start-up: fresh processes with a warm file cache."""

import subprocess
import sys
import time
from pathlib import Path

from serve import serve

TIMED = """
import time
begun = time.perf_counter()
import {module}
seconds = time.perf_counter() - begun
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
open(3, "w").write(f"{{seconds}} {{int(peak.split()[1]) / 1024}}")
"""
memory: dict[str, float] = {}


def timed(module: str) -> float:
    code = TIMED.format(module=module)
    shell = [
        "bash", "-c", 'exec 3>&1 >/dev/null 2>&1; exec "$0" -c "$1"', sys.executable, code,
    ]  # fmt: skip
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=True)
    seconds, memory[module] = map(float, done.stdout.split())
    return seconds


def show_help() -> float:
    begun = time.perf_counter()
    command = [str(Path(sys.executable).with_name("lmcache")), "--help"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun


ENGINE = "lmcache.v1.distributed.storage_manager"
serve(
    {
        "import.seconds": lambda: timed("lmcache"),
        "import.rss": lambda: memory["lmcache"],
        "import.engine.seconds": lambda: timed(ENGINE),
        "import.engine.rss": lambda: memory[ENGINE],
        "cli.help.seconds": show_help,
    }
)
