"""The command `kvcore`."""

import sys
from collections.abc import Sequence

AGAIN_S = 0.05
"""After an interrupt that was dropped it comes again: what dropped it is over by then."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` defaults to the process's arguments. Returns the exit status: 0; 1 for what was found
    wrong; 2 for wrong usage; 130 when interrupted, be it while modules are imported."""
    try:
        return _heeding(argv)
    except KeyboardInterrupt:
        pass
    except Exception as e:
        if not interrupted(e):
            raise
    if sys.stderr is not None:
        print("kvcore: interrupted", file=sys.stderr)
    return 130


def interrupted(error: BaseException | None) -> bool:
    """Whether an error is what became of Ctrl-C: pydantic's compiled part makes a `SchemaError` of it, and leaves
    nothing but its name at the end of the text."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or str(error).rstrip(" :\n").endswith("KeyboardInterrupt"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _heeding(argv: Sequence[str] | None) -> int:
    """Python drops an interrupt that comes in a callback, such as those of its imports and of a fork: it prints a
    traceback and goes on. Here it comes again."""
    import threading
    from _thread import interrupt_main

    before = sys.unraisablehook
    clocks: list[threading.Timer] = []

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        clocks.append(threading.Timer(AGAIN_S, interrupt_main))
        clocks[-1].start()

    sys.unraisablehook = hook
    try:
        from kvcore.cli.app import run

        status = run(argv)
        if status != 130 and any(clock.is_alive() for clock in clocks):  # over before it came again
            raise KeyboardInterrupt
        return status
    finally:
        sys.unraisablehook = before
        for clock in clocks:
            clock.cancel()
            clock.join()
