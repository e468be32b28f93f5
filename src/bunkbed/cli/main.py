"""Entry point of the command: run the sub-command; turn every failure into one line and an exit code.

Exit codes: 0 success; 1 failure; 2 the command line is wrong; 130 interrupted by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bunkbed.cli.shared.console import UsageProblem, describe, print_error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        argv: arguments without the program's name; default: those of the process.

    Raises:
        SystemExit: always.
    """
    is_own_process = argv is None
    if is_own_process:  # Python's collector looks for garbage among the objects of imported modules again and again
        gc.set_threshold(50_000)
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = _take_debug(arguments) or os.environ.get("BUNKBED_DEBUG", "") not in ("", "0")
    with _sigterm_as_ctrl_c():
        code = _run(arguments or ["--help"], debug)
    if is_own_process:
        gc.freeze()  # and several times more when it ends, which takes 0.3 s where torch is imported
    sys.exit(code)


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that the command cleans up; keep a handler that the caller installed."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run(arguments: list[str], debug: bool) -> int:
    # Imported here, so that `--debug` also shows where one of these imports fails.
    from bunkbed.cli.app import app

    try:
        code = app(args=arguments, prog_name="bunkbed", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) closed the pipe. Without dup2 Python would report it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        if debug:
            raise
        print_error("interrupted")
        return 130
    except Exception as error:
        # New releases of Typer contain a copy of click, older ones import it, so the class is not checked by name.
        if callable(getattr(error, "format_message", None)):
            print_error(_usage_message(error, arguments))
            return 2
        if type(error).__name__ == "Abort":
            print_error("interrupted")
            return 130
        if debug:
            raise
        print_error(describe(error))
        return 2 if isinstance(error, UsageProblem) else 1
    return code if isinstance(code, int) else 0


def _usage_message(error: Exception, arguments: list[str]) -> str:
    message = str(error.format_message())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "bunkbed"
    message = message[:1].lower() + message[1:].rstrip(".")
    return f"{message}; see {command} --help"


def _take_debug(arguments: list[str]) -> bool:
    """Remove ``--debug`` at any position before ``--``: users add it at the end of a failed command."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    found = "--debug" in arguments[:end]
    arguments[:end] = [argument for argument in arguments[:end] if argument != "--debug"]
    return found
