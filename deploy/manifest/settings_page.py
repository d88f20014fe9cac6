"""Writes what is made from the table of settings: docs/reference/settings.md and the manifest's JSON Schema.

With --check it writes nothing and fails where one of them is not what the table says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from relayline.deploy.manifest.schema import SCHEMA_FILE, schema_text
from relayline.wire.settings.setting import Reader, Setting, entries
from relayline.wire.settings.table import TABLES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"
READERS = {
    Reader.STAGE: "stages",
    Reader.COORDINATOR: "the coordinator",
    Reader.STAGE | Reader.COORDINATOR: "both",
}
HEAD = """# Settings

<!-- Made by `make reference` from wire/settings/table.py. Do not edit this page. -->

Each setting can be said with a flag, with an environment variable (for `relayline up` and `relayline serve`) and in a
manifest, below `spec`. A flag wins over a variable, and a variable over the manifest. A value that is not allowed is
refused with one line, before anything is done.
"""
COLUMNS = ("flag", "variable", "manifest", "values", "default", "for", "meaning")


def page_text() -> str:
    """Return the reference page of all settings."""
    parts = [HEAD]
    for table in TABLES:
        title = (table.__doc__ or "").splitlines()[0].rstrip(".")
        rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, entries(table))]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
    return "\n".join(parts)


def _row(entry: Setting) -> tuple[str, ...]:
    default = "" if entry.default in (None, "") else f"`{entry.text(entry.default)}`"
    values = "true, false" if entry.is_switch else entry.allowed or "text"
    meaning = " ".join(entry.doc.split())
    if entry.is_negated:
        meaning += f" `{entry.flag}` turns it off."
    place = f"`{entry.place}`" if entry.place else ""
    return f"`{entry.flag}`", f"`{entry.variable}`", place, values, default, READERS[entry.reader], meaning


def main() -> None:
    """Write the files, or compare."""
    made = {PAGE: page_text(), SCHEMA_FILE: schema_text()}
    if "--check" not in sys.argv:
        for path, text in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if stale:
        sys.exit(f"not what the table of settings says: {', '.join(stale)}; run `make reference`")
    print(f"{len(made)} files match the table of settings")


if __name__ == "__main__":
    main()
