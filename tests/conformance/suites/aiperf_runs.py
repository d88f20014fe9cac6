"""AIPerf: short measurements at several numbers of streams. Every request must be answered."""

# mypy: ignore-errors
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
N_REQUESTS = 8
LOAD = ["--request-count", N_REQUESTS, "--concurrency", 4, "--random-seed", 1, "--num-dataset-entries", 4]
SIZES = ["--synthetic-input-tokens-mean", 16, "--output-tokens-mean", 8]
# An answer without a text counts as an error: none ends at once, and none is drawn from tokens that have no text.
ENDLESS = ["--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Write a tokenizer of single bytes: AIPerf counts with its own, and would fetch one."""
    vocabulary = {each: at for at, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="a", eos_token="b").save_pretrained(path)
    return path


@pytest.mark.timeout(450)  # it starts a dozen processes each time
@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_every_request_is_answered(endpoint, tokenizer, tmp_path):
    command = [
        Path(sys.executable).parent / "aiperf",
        "profile",
        "--model",
        MODEL,
        "--url",
        URL,
        *LOAD,
        *SIZES,
        *ENDLESS,
    ]
    command += [
        "--endpoint-type",
        endpoint,
        "--streaming",
        "--artifact-dir",
        tmp_path,
        "--ui-type",
        "none",
        "--tokenizer",
        tokenizer,
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stderr or done.stdout)[-2000:]
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    found = json.loads(report.read_text())
    assert found["request_count"]["avg"] == N_REQUESTS, found.get("error_summary")
    assert not found.get("error_summary")
    assert found["time_to_first_token"]["avg"] > 0
