"""`python -m ccq`, and the `ccq` script: Ctrl-C gets a line from here on, also while the rest is imported."""

import signal
import sys
from typing import Any


def main() -> int:
    heard = []

    def hear(*_: Any) -> None:
        heard.append(True)
        raise KeyboardInterrupt

    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else someone wants it ignored
            signal.signal(signal.SIGINT, hear)
        from ccq.cli import main

        code = main()
    except BaseException:
        if not heard:
            raise
        code = 1
    if heard and code != 130:  # other people's imports may make another error of it
        print("interrupted", file=sys.stderr)
        code = 130
    return code


if __name__ == "__main__":
    sys.exit(main())
