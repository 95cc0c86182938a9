"""YAML as data that knows its lines."""

import pytest

from omnid.config.document import parse
from omnid.config.errors import ConfigError


def test_each_value_remembers_its_line() -> None:
    document = parse("a:\n  b:\n    - 1\n    - c: 2\n", "x.yaml")
    assert document.data == {"a": {"b": [1, {"c": 2}]}}
    assert [document.place(path).line for path in (("a",), ("a", "b"), ("a", "b", 1), ("a", "b", 1, "c"))] == [
        1,
        2,
        4,
        4,
    ]
    assert document.place(("a", "b", 1, "not there")).line == 4


def test_a_key_given_twice_is_refused_with_both_lines() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml:3: a: given twice; first on line 1"):
        parse("a: 1\nb: 2\na: 3\n", "x.yaml")


def test_broken_yaml_gives_the_line() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml:2: not YAML"):
        parse("a: 1\n  b: [\n", "x.yaml")


def test_variables_expand_and_take_the_type_of_what_they_hold() -> None:
    text = 'a: ${N:-4}\nb: "${N:-4}"\nc: ${HOME_OF_X:-/tmp}/models\nd: ${SET}\n'
    document = parse(text, "x.yaml", {"SET": "true"})
    assert document.data == {"a": 4, "b": "4", "c": "/tmp/models", "d": True}


def test_a_variable_without_value_or_default_is_named() -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml:1: a: environment variable NOPE is not set"):
        parse("a: ${NOPE}\n", "x.yaml", {})


@pytest.mark.parametrize("text", ["a: !!python/object:os.system x\n", "a: !x y\n", "? [1]\n: 2\n", "<<: {a: 1}\n"])
def test_what_is_not_plain_data_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml:1: "):
        parse(text, "x.yaml", {})
