"""`python -m sglang.launch_server`."""

import sys
import warnings

from sglang.standin.engine import run

if __name__ == "__main__":
    warnings.warn(
        "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint.\n"
        "  Example: sglang serve --model-path <model> [options]",
        UserWarning,
        stacklevel=1,
    )
    sys.exit(run(sys.argv[1:]))
