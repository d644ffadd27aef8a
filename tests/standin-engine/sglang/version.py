"""Where the real package keeps its version too."""

from sglang import __version__

__all__ = ["__version__"]
