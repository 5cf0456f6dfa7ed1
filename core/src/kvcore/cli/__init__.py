"""The command `kvcore`."""

import sys
from collections.abc import Sequence
from threading import Timer
from types import FrameType

AGAIN_S = 0.05
"""An interrupt that was dropped or held comes again so much later."""
HOLD_S = 5.0
"""An import that takes longer is interrupted all the same."""
_clocks: list[Timer] = []


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


def held() -> bool:
    """Whether an interrupt is still to come. Who becomes another program, or tells an error, asks first."""
    return any(clock.is_alive() for clock in _clocks)


def _heeding(argv: Sequence[str] | None) -> int:
    """Python drops an interrupt that comes in a callback, such as those of a fork: it prints a traceback and goes on.
    In the midst of an import, compiled code makes a panic of it. Here it comes again."""
    import signal
    from threading import current_thread, main_thread
    from time import monotonic

    before, main = sys.unraisablehook, main_thread().ident
    give_up: list[float] = []

    def again() -> None:
        _clocks.append(Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)))  # so that what waits wakes up
        _clocks[-1].start()

    def hook(dropped: "sys.UnraisableHookArgs") -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            again()
        else:
            before(dropped)

    def heed(number: int, frame: FrameType | None) -> None:
        if not give_up:
            give_up.append(monotonic() + HOLD_S)
        if monotonic() < give_up[0] and _importing(frame):
            again()
        else:
            signal.default_int_handler(number, frame)

    ours = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    sys.unraisablehook = hook
    try:
        if ours:
            signal.signal(signal.SIGINT, heed)
        from kvcore.cli.app import run

        status = run(argv)
        if status != 130 and held():  # over before it came again
            raise KeyboardInterrupt
        return status
    finally:
        sys.unraisablehook = before
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        while _clocks:
            clock = _clocks.pop()
            clock.cancel()
            clock.join()


def _importing(frame: FrameType | None) -> bool:
    """Whether what runs in a command is an import."""
    while frame is not None and frame.f_code is not _heeding.__code__:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
