"""Runs what the last run of pytest has failed once more, one test after another, with nothing beside them.

Ends with 0 only if all of them pass now, and names them: each is a race, in a test or in what it tests, to be mended.
With more than `MOST` failures, or none on record (pytest itself has failed), it runs nothing and ends with 1.
"""

import json
import subprocess
import sys
from pathlib import Path

MOST = 5
RECORD = Path(".pytest_cache/v/cache/lastfailed")


def main(arguments: list[str]) -> int:
    """`arguments`: more for pytest."""
    failed = list(json.loads(RECORD.read_text())) if RECORD.is_file() else []
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} failed tests on record; 1 to {MOST} are run again", file=sys.stderr)
        return 1
    status = subprocess.run([sys.executable, "-m", "pytest", *arguments, "--", *failed], check=False).returncode
    verdict = "passed alone, and failed beside others" if status == 0 else "run again, with failures"
    print("\n".join([f"{len(failed)} tests {verdict}:", *(f"  {test}" for test in failed)]))
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
