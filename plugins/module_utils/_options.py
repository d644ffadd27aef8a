# Copyright: The gpufleet.sglang contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# PRIVATE to the collection gpufleet.sglang: may change at any time.
"""The installed engine's command line: which flags it knows and which values they take.

The list comes from the engine's own argparse parser (_options_read.py asks it, once per release) and is
kept in options-<release>.json, so that a plan can check every flag before anything restarts.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1


class OptionsFileError(Exception):
    """options-<release>.json is missing, unreadable or of another schema; names the file and the remedy."""


@dataclass(frozen=True)
class Option:
    """One option of the engine's parser."""

    opts: tuple[str, ...]  # all spellings, as the parser lists them: ("--model-path", "--model")
    choices: tuple[str, ...] | None = None  # as strings
    nargs: str | int | None = None  # None = one value, 0 = bare flag, "?", "*", "+", or a count
    action: str = "_StoreAction"  # class name
    default: str = "None"  # repr()
    type: str | None = None  # name of the converter: int, float, str, loads, ...
    message: str = ""  # of a retired flag: why the engine refuses it, or what replaces it
    refused: bool = False  # the engine stops when it sees this flag (retired, with an error message)

    @property
    def name(self) -> str:
        """The first long spelling."""
        return next((opt for opt in self.opts if opt.startswith("--")), self.opts[0])

    @property
    def bare(self) -> bool:
        """True for a flag without a value."""
        return self.nargs == 0

    @property
    def negation(self) -> str | None:
        """The --no-... spelling of an on/off flag that has one."""
        return next((opt for opt in self.opts if opt.startswith("--no-") and f"--{opt[5:]}" in self.opts), None)


def flag_name(name: str) -> str:
    """Spell a setting as the flag it stands for: mem_fraction_static, mem-fraction-static -> --mem-fraction-static."""
    return name if name.startswith("-") else "--" + name.replace("_", "-")


def find_option(options: Sequence[Option], name: str) -> Option | None:
    """Return the option with exactly this spelling (dashes optional), or None; abbreviations don't count."""
    flag = flag_name(name)
    return next((option for option in options if flag in option.opts), None)


def abbreviations(options: Sequence[Option], name: str) -> list[str]:
    """Return the spellings that argparse would take `name` as an abbreviation of, one per option."""
    flag = flag_name(name)
    if not flag.startswith("--") or find_option(options, flag) is not None:
        return []
    return [next(opt for opt in o.opts if opt.startswith(flag)) for o in options if _starts(o, flag)]


def _starts(option: Option, flag: str) -> bool:
    return any(opt.startswith(flag) for opt in option.opts)


def suggest(options: Sequence[Option], name: str, count: int = 3) -> list[str]:
    """Return the known flags most like `name`, best first: longer spellings of it, then near ones by difflib."""
    flag = flag_name(name)
    known = [opt for option in options for opt in option.opts if opt.startswith("--")]
    found = abbreviations(options, flag)
    found += [
        opt for opt in difflib.get_close_matches(flag, known, n=count + len(found), cutoff=0.7) if opt not in found
    ]
    return found[:count]


def option_to_dict(option: Option) -> dict[str, Any]:
    """Return plain data, as the options file holds it; fields at their default are left out."""
    defaults = asdict(Option(opts=()))
    return {key: value for key, value in asdict(option).items() if key == "opts" or value != defaults[key]}


def option_from_dict(data: Mapping[str, Any]) -> Option:
    """Build an Option from plain data."""
    choices = data.get("choices")
    return Option(
        **{
            **data,
            "opts": tuple(data["opts"]),
            "choices": None if choices is None else tuple(str(choice) for choice in choices),
        }
    )


@dataclass(frozen=True)
class EngineOptions:
    """The option list of one installed engine."""

    version: str  # of sglang
    venv: str
    fingerprint: str  # of the files the parser is built from
    options: tuple[Option, ...]
    entry: str = ""  # where the parser was found: sglang.srt.server_args:ServerArgs.add_cli_args
    launch_server: bool = True  # `python -m sglang.launch_server` exists
    serve: bool = False  # `<venv>/bin/sglang serve` exists
    schema: int = SCHEMA

    @classmethod
    def load(cls, path: str) -> EngineOptions:
        """Read options-<release>.json; raises OptionsFileError."""
        remedy = "run the deploy with --tags engine: it reads the engine's options anew"
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            if data.get("schema") != SCHEMA:
                raise OptionsFileError(f"{path}: schema {data.get('schema')!r}, expected {SCHEMA}: {remedy}")
            return cls(**{**data, "options": tuple(option_from_dict(item) for item in data["options"])})
        except OSError as exc:
            raise OptionsFileError(f"{path}: {exc.strerror}: {remedy}") from exc
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise OptionsFileError(f"{path}: not an option list ({exc}): {remedy}") from exc

    def to_json(self) -> str:
        """Return the text of the options file; equal lists give equal bytes."""
        fields = {**asdict(self), "options": [option_to_dict(option) for option in self.options]}
        return json.dumps(fields, indent=1, sort_keys=True) + "\n"

    def find(self, flag: str) -> Option | None:
        """Return the option with exactly this spelling (dashes optional), or None."""
        return find_option(self.options, flag)

    def has(self, flag: str) -> bool:
        """True when the engine knows the flag in exactly this spelling."""
        return self.find(flag) is not None

    def suggest(self, flag: str) -> list[str]:
        """Return the known flags most like this one, best first."""
        return suggest(self.options, flag)

    def check(self, flag: str, value: Any = True) -> str | None:
        """Return what the engine would object to in `--flag value`, in one line, or None.

        value: True = the bare flag, False/None = not given, a list = several values.
        """
        if value is None:
            return None
        name = flag_name(flag)
        option = self.find(name)
        if option is None:
            return self._unknown(name)
        if option.action in ("_HelpAction", "_VersionAction"):
            return f"{name} prints a text and ends the server"
        if option.refused:
            return f"{name} was retired in SGLang {self.version}: {option.message or 'the engine stops on it'}"
        if option.bare:
            return None if isinstance(value, bool) else f"{name} is a bare flag and takes no value, got {_show(value)}"
        if value is False:
            return None
        return _check_values(name, option, value)

    def _unknown(self, name: str) -> str:
        longer = abbreviations(self.options, name)
        if len(longer) > 1:
            return f"{name} is ambiguous in SGLang {self.version}: it could be {', '.join(longer)}"
        if longer:
            return f"{name} is short for {longer[0]} in SGLang {self.version}: write it in full"
        near = self.suggest(name)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"SGLang {self.version} has no option {name}{hint}"


def _check_values(name: str, option: Option, value: Any) -> str | None:
    if value is True:
        return None if option.nargs in ("?", "*") else f"{name} needs a value"
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    several = option.nargs in ("*", "+") or isinstance(option.nargs, int) or "Append" in option.action
    if len(values) != 1 and not several:
        return f"{name} takes one value, got {len(values)}: {_show(values)}"
    if option.nargs == "+" and not values:
        return f"{name} needs at least one value"
    if isinstance(option.nargs, int) and len(values) != option.nargs:
        return f"{name} takes {option.nargs} values, got {len(values)}: {_show(values)}"
    for item in values:
        if option.choices is not None and str(item) not in option.choices:
            near = difflib.get_close_matches(str(item), option.choices, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            many = len(option.choices) > 12
            known = f"the {len(option.choices)} values it knows" if many else ", ".join(option.choices)
            return f"{name}: {item!s} is not one of {known}{hint}"
        problem = _check_type(name, option, item)
        if problem:
            return problem
    return None


def _check_type(name: str, option: Option, item: Any) -> str | None:
    converters: dict[str, Any] = {"int": int, "float": float}
    if option.type not in converters:
        return None
    try:
        converters[option.type](str(item))
    except ValueError:
        return f"{name}: {_show(item)} is not {'an integer' if option.type == 'int' else 'a number'}"
    return None


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
