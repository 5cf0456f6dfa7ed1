"""SGLang's HiCache over every configuration file, see `drive.py`. One engine takes them one after the other."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import drive
from engines import PROMPTS, engine


@contextmanager
def opened(models: Path) -> Iterator[tuple[Any, dict[str, drive.Serve]]]:
    """SGLang attaches a storage while it runs, and detaches the one before."""
    with engine(models / "tiny", None) as one:

        def serve(file: Path) -> drive.Cell:
            assert not (refused := one.attach({"config": str(file)})), refused
            texts, loaded = one.run(PROMPTS)
            one.forget()  # not before all is stored
            numbers = one.numbers()
            faults = {name: count for name, count in numbers.items() if name.startswith("kvcore_faults") and count}
            return drive.cell(texts, sum(map(len, PROMPTS)), sum(loaded), numbers, faults)

        yield one.run(PROMPTS)[0], {"sglang": serve}


if __name__ == "__main__":  # SGLang's ranks import this file again
    drive.main("sglang", opened)
    sys.stdout.flush()
    os._exit(0)  # an orderly end frees all that it has imported, piece by piece, which takes seconds
