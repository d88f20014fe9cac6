"""The tables of docs/results/ are made from stored figures. All figures are shown, each with its origin."""

from __future__ import annotations

from benches import tables


def test_quotients_are_worked_out():
    measured = {"rows": [{"id": "a", "values": [3, None]}, {"id": "b", "values": [2, 1]}, {"divide": ["a", "b"]}]}
    assert tables.values_of(measured) == [[3, None], [2, 1], [1.5, None]]
    assert tables.row_of(measured, "b") == [2, 1]


def test_every_measurement_stands_on_a_page_and_says_where_it_comes_from():
    shown = {name for page in tables.PAGES.glob("*.md") for _, name in tables.BLOCK.findall(page.read_text())}
    stored = {path.stem for path in tables.RESULTS.glob("*.json")} - {"machines"}
    assert shown == stored
    for name in stored:
        measured = tables.load(name)
        assert measured["machine"] in tables.load("machines")
        assert all(measured[key] for key in ("date", "commit", "command"))
        assert all(len(values) == len(measured["columns"]) for values in tables.values_of(measured))


def test_a_page_is_filled_from_its_file():
    page = "before\n<!-- table: heldout -->\nold\n<!-- end -->\nbehind\n"
    made = tables.filled(page)
    assert made.startswith("before\n")
    assert made.endswith("<!-- end -->\nbehind\n")
    assert "| unsplit | 2.9773 | 2.3873 |" in made
    assert "old" not in made
    assert tables.filled(made) == made
