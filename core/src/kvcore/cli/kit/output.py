"""Output: JSON, tables and marks. Colour only on a terminal without NO_COLOR; rich only there and when installed."""

import errno
import json
import os
import select
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
LINES = "\n\t"
"""What a text of several lines may have in it."""
COLOURS = {"ok": "32", "note": "36", "warning": "33", "error": "31", "dim": "2", "bold": "1"}


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, default=str))


def printable(text: str, keep: str = "") -> str:
    """Words of others, such as the id of a request, for a terminal: what would move its cursor, colour it or turn the
    direction of its writing is a `?`, but for what is in `keep`."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c in keep else "?" for c in text)


def cut(text: str, width: int) -> str:
    """The same in at most so many characters."""
    shown = printable(text)
    return shown if len(shown) <= width else f"{shown[: max(0, width - 3)]}..."


def error(text: str) -> None:
    """An error on stderr: `kvcore: ...`. Lost when stderr takes nothing: there is no third place to say it."""
    with suppress(OSError):
        print(f"{paint('kvcore:', 'error', sys.stderr)} {printable(text, LINES)}", file=sys.stderr, flush=True)


def os_error(cause: OSError) -> int:
    """Say what the system has refused; the exit status. Not when the reader of the output has left, as `head` does."""
    if isinstance(cause, BrokenPipeError) and _reader_has_left():
        return 1
    if cause.filename is not None:
        error(f"{cause.filename}: {cause.strerror}")
    else:  # a descriptor: the output, where nothing says otherwise
        text = str(cause) or type(cause).__name__
        error(f"cannot write: {cause.strerror}" if cause.errno in _WRITE_ERRORS else text)
    return 1


def _reader_has_left() -> bool:
    """Of standard output, where that is a pipe or a socket."""
    try:
        events = select.poll()
        events.register(sys.stdout.fileno(), 0)
        return bool(events.poll(0))  # POLLERR, POLLHUP: nobody can read it
    except (OSError, ValueError):
        return False


def write_file(path: str | Path, text: str, *, new: bool = False) -> None:
    """Write a text file. Where there is no room for all of it, it is not left there half, and the error names it.

    Raises `OSError`; `FileExistsError` with `new`, where there is one.
    """
    file = open(path, "x" if new else "w", encoding="utf-8")  # noqa: SIM115 - what this raises leaves nothing behind
    try:
        with file:
            file.write(text)
    except OSError as e:
        with suppress(OSError):
            if stat.S_ISREG(os.stat(path).st_mode):
                os.unlink(path)
        raise OSError(e.errno, e.strerror, str(path)) from e


def settle(status: int) -> int:
    """Let the output arrive; the exit status, which is 1 when it could not."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError as e:
            if stream is sys.stdout:
                status = status or os_error(e)
            with suppress(OSError):  # the interpreter would try again at its end, and complain
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def coloured(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that shows colour."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """`text` in a colour of `COLOURS`, where `stream` (default stdout) shows colour."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if coloured(stream or sys.stdout) else text


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; on a terminal with rich, the last column wraps."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _rich():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for i, header in enumerate(headers):
            drawn.add_column(header, overflow="fold", no_wrap=i == 0)
        for row in rows:
            drawn.add_row(*(Text(cell) for cell in row))
        Console().print(drawn)
        return
    widths = [max(len(r[i]) for r in (headers, *rows)) for i in range(len(headers))]
    for n, row in enumerate((headers, *rows)):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(paint(line, "bold") if n == 0 else line)


def track(items: Sequence[Any], what: str, *, quiet: bool = False) -> Iterator[Any]:
    """`items`, with a progress bar on stderr while they take their time, when stderr is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield from items
    elif _rich():
        from rich.console import Console
        from rich.progress import track as rich_track

        yield from rich_track(items, description=what, console=Console(stderr=True), transient=True)
    else:
        yield from _bar(items, what)


def _bar(items: Sequence[Any], what: str) -> Iterator[Any]:
    width = min(30, shutil.get_terminal_size().columns - len(what) - 12)
    for done, item in enumerate(items):
        filled = width * done // len(items)
        sys.stderr.write(f"\r{what} [{'#' * filled}{'.' * (width - filled)}] {done}/{len(items)}")
        sys.stderr.flush()
        yield item
    sys.stderr.write("\r\x1b[K")
    sys.stderr.flush()


def lines(texts: Iterable[str]) -> None:
    """One text a line on stdout."""
    for text in texts:
        print(text)


def _rich() -> bool:
    from importlib.util import find_spec

    return find_spec("rich") is not None
