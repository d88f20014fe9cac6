from __future__ import annotations

from pathlib import Path

import pytest

from relayline.wire.common.errors import UsageError
from relayline.wire.model_files.adapter_texts import ADAPTERS_MAX, AdapterText, placed, read_adapters, text_of
from relayline.wire.settings.table import ServingSettings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("style.gguf", ("", "style.gguf", 1.0)),
        ("style.gguf:0.5", ("", "style.gguf", 0.5)),
        ("sql=dir/sql.gguf", ("sql", "dir/sql.gguf", 1.0)),
        ("sql = dir/sql.gguf:-2", ("sql", "dir/sql.gguf", -2.0)),
        ("dir/a=b.gguf", ("", "dir/a=b.gguf", 1.0)),
        ("c:/x:y.gguf", ("", "c:/x:y.gguf", 1.0)),
    ],
)
def test_a_file_may_have_a_name_and_a_scale(text: str, expected: tuple[str, str, float]) -> None:
    assert read_adapters(text) == (AdapterText(*expected),)
    assert read_adapters(text_of(read_adapters(text))) == read_adapters(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "give files separated by commas"),
        ("a.gguf,", "give files separated by commas"),
        ("a b=x.gguf", "'a b' is no name"),
        ("a=x.gguf,a=y.gguf", "two adapters have one name"),
        ("x.gguf:0", "the scale 0 is not a number"),
        ("x.gguf:nan", "the scale nan is not a number"),
        ("x.gguf:1e9", "the scale 1e9 is not a number"),
        (",".join(f"{at}.gguf" for at in range(ADAPTERS_MAX + 1)), f"at most {ADAPTERS_MAX} can be served"),
    ],
)
def test_a_bad_text_says_what_to_write(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_adapters(text)


def test_the_setting_refuses_it_with_its_flag() -> None:
    with pytest.raises(UsageError, match=r"^--lora 'x.gguf:0': the scale 0"):
        ServingSettings(lora="x.gguf:0")
    assert ServingSettings(lora="x.gguf,sql=y.gguf").adapter_names == ("sql",)


def test_the_way_back_keeps_every_digit_and_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    given = (AdapterText("", "/x/a.gguf", 0.1234567890123), AdapterText("sql", "/x/b.gguf", -2.0))
    assert read_adapters(text_of(given)) == given
    assert placed("a.gguf,sql=b.gguf:0.5", lambda path: tmp_path / path) == (
        f"{tmp_path}/a.gguf:1.0,sql={tmp_path}/b.gguf:0.5"
    )
    with pytest.raises(ValueError, match="has a comma"):
        placed("a.gguf", lambda path: tmp_path / "x,y" / path)
