"""Suites that are compiled: Go, Rust and Java. Each is one file of ours that drives a library of its language.

The files have another suffix here, so that no tool takes their folder for a module, a crate or a package.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.conformance.commands import SUITES_DIR, call, new, program, run
from tests.conformance.table import Suite

_CRATE = '[package]\nname = "conformance"\nversion = "0.0.0"\nedition = "2021"\n[profile.dev]\ndebug = false\n'
_PROJECT = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>relayline</groupId><artifactId>conformance</artifactId><version>0</version>
  <properties>
    <maven.compiler.source>17</maven.compiler.source><maven.compiler.target>17</maven.compiler.target>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
  <dependencies>{dependencies}</dependencies>
  <build><plugins><plugin>
    <groupId>org.apache.maven.plugins</groupId><artifactId>maven-surefire-plugin</artifactId><version>3.5.3</version>
  </plugin></plugins></build>
</project>
"""


def run_go(suite: Suite, place: Path, url: str, model: str) -> Path:
    """Run a suite of ours by `go test`."""
    go, report = program("go"), new(place / suite.report)
    _copied(suite, place / "conformance_test.go")
    if not (place / "go.mod").exists():
        call([go, "mod", "init", "conformance"], place)
    call([go, "get", *suite.requirements], place)
    run([go, "test", "-json", "-count=1", "./..."], place, report, _served(url, model))
    return report


def run_cargo(suite: Suite, place: Path, url: str, model: str) -> Path:
    """Run a suite of ours by `cargo test`: its output is its report."""
    cargo, report = program("cargo"), new(place / suite.report)
    _copied(suite, place / "tests" / "conformance.rs")
    (place / "src").mkdir(exist_ok=True)
    (place / "src" / "lib.rs").touch()
    crates = (
        f'{name} = {{ version = "{version}", default-features = false, features = {features} }}\n'
        for name, version, features in _pins(suite)
    )
    (place / "Cargo.toml").write_text(f"{_CRATE}[dependencies]\n{''.join(crates)}")
    call([cargo, "fetch", "--quiet"], place)
    run([cargo, "test", "--color", "never", "--test", "conformance"], place, report, _served(url, model))
    return report


def run_maven(suite: Suite, place: Path, url: str, model: str) -> Path:
    """Run a suite of ours by Maven."""
    maven, report = program("mvn"), new(place / suite.report)
    _copied(suite, place / "src" / "test" / "java" / "ConformanceTest.java")
    dependencies = (
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{version}</version></dependency>"
        for name, version, _ in _pins(suite)
        for group, _, artifact in [name.partition(":")]
    )
    (place / "pom.xml").write_text(_PROJECT.format(dependencies="".join(dependencies)))
    call([maven, "-B", "-q", "dependency:resolve"], place)
    run([maven, "-B", "test"], place, place / "log", _served(url, model))
    return report


def _copied(suite: Suite, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(SUITES_DIR / suite.tests[0], target)


def _served(url: str, model: str) -> dict[str, str]:
    return {"CONFORMANCE_URL": url, "CONFORMANCE_MODEL": model}


def _pins(suite: Suite) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, version and features of each requirement, which is written as NAME[FEATURE,...]@VERSION."""
    for requirement in suite.requirements:
        whole, _, version = requirement.rpartition("@")
        name, features = re.fullmatch(r"([^\[]*)(?:\[(.*)\])?", whole).groups()  # type: ignore[union-attr]
        yield name, version, (features or "").split(",") if features else []
