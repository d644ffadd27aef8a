"""Loads what was built."""

import ctypes


def load_module(path):
    return ctypes.CDLL(path)
