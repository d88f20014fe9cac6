"""The outcome for every architecture of the installed llama.cpp, and the page that lists it.

python -m tests.families --report   every legal cut of every tiny model, each in a child process
python -m tests.families --docs     write docs/reference/families.md
python -m tests.families --check    exit 1 if that page is not what --docs would write
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from relayline.coordinator.model.families import FAMILIES
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.refused_families import REFUSED
from relayline.deploy.models.trial import why_it_ended
from tests.support.architectures import architectures
from tests.support.families_page import PAGE, page
from tests.support.family_check import ERROR_MAX, ERROR_OTHER_ROWS_MAX, check, covering_cuts, is_legal
from tests.support.tiny_families import RECIPES
from tests.support.tiny_models import make_tiny

TIME_LIMIT_S = 300.0  # for all cuts of one tiny model; most take a second or two
CERTIFIED, REFUSED_BY_NAME, WRONG, HUNG, ABSENT = "certified", "refused", "wrong or aborted", "hung", "neither"


def certify(name: str) -> None:
    """Compare every legal cut of one tiny model with the whole; print the distances."""
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny(name, Path(scratch, "model.gguf"))
        facts = inspect_model(model)
        if facts.refusal is not None:
            raise SystemExit(f"{name}: {facts.refusal}")
        single = [(cut,) for cut in facts.legal_cuts if is_legal(facts, (cut,))]
        limit = ERROR_OTHER_ROWS_MAX if name == "gemma3:27b" else ERROR_MAX  # its slices carry a rounded factor
        worst = check(model, [(), *single, *covering_cuts(facts)], Path(scratch), limit)
        print(f"{name}: cuts {_runs(facts.legal_cuts)} of {facts.n_layers} layers, difference {worst:.0e}")


def _runs(cuts: tuple[int, ...]) -> str:
    if len(cuts) > 2 and cuts[-1] - cuts[0] == len(cuts) - 1:
        return f"{cuts[0]}-{cuts[-1]}"
    return ",".join(map(str, cuts))


def try_recipe(name: str) -> tuple[str, str]:
    """Certify one tiny model in a child process; return what became of it and one line."""
    command = [sys.executable, "-m", "tests.families", "--one", name]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return HUNG, f"{name}: no end within {TIME_LIMIT_S:.0f} s"
    if ended.returncode:
        return WRONG, f"{name}: {why_it_ended(ended.returncode, ended.stderr)}"
    return CERTIFIED, ended.stdout.decode().strip()


def report(only: list[str]) -> int:
    """Print every architecture as certified or refused; return how many are neither."""
    names = only or architectures()
    recipes = {name: [each for each in RECIPES if RECIPES[each].architecture == name] for name in names}
    counts = dict.fromkeys((CERTIFIED, REFUSED_BY_NAME, WRONG, HUNG, ABSENT), 0)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        tried = {name: [pool.submit(try_recipe, each) for each in recipes[name]] for name in names}
        for name in names:
            found = [each.result() for each in tried[name]]
            if name in FAMILIES and found:
                outcome = next((outcome for outcome, _ in found if outcome != CERTIFIED), CERTIFIED)
                text = "; ".join(line for _, line in found)
            elif name in REFUSED and name not in FAMILIES:
                outcome, text = REFUSED_BY_NAME, REFUSED[name]
            else:
                outcome, text = ABSENT, "it stands in no table, or has no tiny model"
            counts[outcome] += 1
            print(f"{name:18} {outcome:10} {text}", flush=True)
    print(f"{len(names)} architectures: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return counts[WRONG] + counts[HUNG] + counts[ABSENT]


def main() -> int:
    """Run one of the commands; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.families", description="Families of models, proven and told.")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--report", action="store_true", help="try every legal cut of every family")
    group.add_argument("--docs", action="store_true", help=f"write {PAGE.name}")
    group.add_argument("--check", action="store_true", help=f"compare {PAGE.name} with the table")
    group.add_argument("--one", metavar="MODEL", choices=RECIPES, help="try one tiny model, in this process")
    parser.add_argument("only", nargs="*", metavar="ARCHITECTURE", help="with --report: these alone")
    given = parser.parse_args()
    if given.one:
        certify(given.one)
        return 0
    if given.report:
        return 1 if report(given.only) else 0
    if given.docs:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print(f"{PAGE} is not what the table says; run python -m tests.families --docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
