"""YAML as data that knows its lines."""

import pytest

from omnid.config.document import DEEPEST, parse
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


@pytest.mark.parametrize("written", ['a: "x\\0y"', 'a: "\\ud800"', 'a: [1, "\\udfff"]', '"\\0": 1'])
def test_a_character_that_no_name_can_hold_is_refused_with_its_line(written: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.yaml:2: .*(that no name can hold|keys must be plain names)$"):
        parse(f"b: 1\n{written}\n", "x.yaml")


def test_a_byte_that_yaml_does_not_have_is_refused_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r"^x\.yaml:2: not YAML: special characters are not allowed$"):
        parse("a: 1\nb: \x01\n", "x.yaml")


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


@pytest.mark.parametrize("text", ["a: " + "[" * 3000 + "]" * 3000, "a: " + "{b: " * 3000 + "1" + "}" * 3000])
def test_what_is_nested_too_deep_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"x\.yaml:2: not YAML: nested deeper than {DEEPEST} levels"):
        parse(f"b: 1\n{text}\n", "x.yaml")


def test_what_is_nested_as_deep_as_is_allowed_is_read() -> None:
    assert parse("[" * DEEPEST + "]" * DEEPEST, "x.yaml").data


@pytest.mark.parametrize("text", ["a: &a [1, *a]", "a: &a {b: {c: *a}}"])
def test_an_anchor_that_holds_itself_is_refused_with_its_path(text: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.yaml:1: a(\[1\]|\.b\.c): is an alias of what it stands in"):
        parse(text, "x.yaml")


def test_aliases_that_multiply_are_refused_at_once() -> None:
    lines = ["a: &x0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 10)}]" for level in range(1, 12)]
    with pytest.raises(ConfigError, match="more than 100000 values"):
        parse("\n".join(lines), "x.yaml")


def test_an_alias_may_be_used_twice() -> None:
    assert parse("a: &a [1]\nb: *a\nc: *a\n", "x.yaml").data == {"a": [1], "b": [1], "c": [1]}


@pytest.mark.parametrize(
    "written", [f"0x{'f' * 9000}", "9" * 9000, "!!bool maybe", "!!int ''", "!!timestamp x", "!!binary a", "2020-99-99"]
)
def test_a_scalar_that_is_not_what_it_says_is_refused_with_its_line(written: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.yaml:1: a: cannot be read as [a-z]+: .{1,90}$"):
        parse(f"a: {written}\n", "x.yaml")
