"""FlashInfer's shape, with a compiler that copies a library of the host's."""

__version__ = "0.7.2"
