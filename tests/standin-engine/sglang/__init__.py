"""Stand-in for SGLang in tests; see README.md beside the package."""

__version__ = "0.5.23+standin"
