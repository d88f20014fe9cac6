"""lm-evaluation-harness: a small task through its clients for completions (log-likelihoods) and for chats."""

# mypy: ignore-errors
from __future__ import annotations

import json
import os

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

URL, MODEL = os.environ["CONFORMANCE_URL"], os.environ["CONFORMANCE_MODEL"]
ROWS = [{"q": "import", "choices": [" os", " zzqq"], "answer": 0}, {"q": "def", "choices": [" %%", " f"], "answer": 1}]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{q}}"}


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Write the rows and a task for each kind of output."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = {**COMMON, "dataset_kwargs": {"data_files": {"test": str(rows)}}}
    choices = {
        **common,
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    texts = {
        **common,
        "task": "texts",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (choices, texts):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(task))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_log_likelihoods_and_texts(tasks):
    where = f"model={MODEL},base_url={URL}/v1/completions,tokenizer_backend=remote,num_concurrent=2,max_retries=1"
    done = lm_eval.simple_evaluate(
        "local-completions", model_args=where, tasks=["choices", "texts"], task_manager=tasks
    )
    assert done["results"]["choices"]["acc,none"] >= 0.5
    assert "exact_match,none" in done["results"]["texts"]


def test_chats(tasks):
    where = f"model={MODEL},base_url={URL}/v1/chat/completions,num_concurrent=2,max_retries=1"
    done = lm_eval.simple_evaluate(
        "local-chat-completions", model_args=where, tasks=["texts"], task_manager=tasks, apply_chat_template=True
    )
    assert "exact_match,none" in done["results"]["texts"]
