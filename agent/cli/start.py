"""Where the command `intercept-agent` begins: an interrupt while it loads is no traceback."""

import signal


def main() -> int:
    """Run the command line and return its exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # and not ignored, as in the background of a shell
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from agent.cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    return run()
