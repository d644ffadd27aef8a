"""Every role's defaults and argument_specs name the same variables with the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

ROLES = sorted(
    p.parent.parent for p in (Path(__file__).resolve().parents[2] / "roles").glob("*/meta/argument_specs.yml")
)
BARE = (None, "", [], {})  # an option without a default may be any of these in defaults/main.yml


def options(role):
    specs = yaml.safe_load((role / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]
    merged = {}
    for entry in specs.values():
        merged.update(entry.get("options") or {})
    return merged


def defaults(role):
    path = role / "defaults/main.yml"
    return (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


def test_every_role_has_argument_specs():
    roles = sorted(p for p in (Path(__file__).resolve().parents[2] / "roles").glob("*") if p.is_dir())
    assert [p.name for p in roles] == [p.name for p in ROLES]


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_same_names(role):
    required = {name for name, option in options(role).items() if option.get("required")}
    assert set(options(role)) - required == set(defaults(role)) - required


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_same_values(role):
    different = {
        name: (value, options(role)[name].get("default"))
        for name, value in defaults(role).items()
        if name in options(role)
        and value != options(role)[name].get("default")
        and not ("default" not in options(role)[name] and value in BARE)
    }
    assert not different, f"(defaults, argument_specs): {different}"


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_every_option_is_typed_and_explained(role):
    poor = [name for name, option in options(role).items() if not option.get("type") or not option.get("description")]
    assert not poor
