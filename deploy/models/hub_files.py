"""The files of the hub's repositories: which ones there are, there and here, and loading one."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from urllib.parse import quote

from relayline.deploy.manifest.model import HUB_SCHEME
from relayline.deploy.models.hub_choice import chosen_file
from relayline.deploy.models.hub_client import DISK_ERRORS, explain_refusal, is_refusal, set_up_hub, unreached
from relayline.deploy.models.hub_download import load_blob
from relayline.deploy.models.hub_patience import is_away
from relayline.deploy.models.hub_reference import HubFile
from relayline.wire.common.errors import ModelFileError
from relayline.wire.common.places import cache_dir

_COMMIT = re.compile(r"(?!.*\.\.)[\w.-][\w./-]{0,199}", re.ASCII)  # or a revision, of a hub that names no commit
ANSWER_S = 10.0  # for the hub's first answer, where the files are here and need none
ENTRIES_MAX = 100_000  # of a repository: files and folders, as many as the hub itself recommends


def with_file(model: HubFile, *, is_found: bool = False) -> HubFile:
    """Return the model with the name of its file, chosen by its quantisation. Raises ModelFileError.

    `is_found`: it was chosen just now, and is here; then it is among those that are.
    """
    if model.file:
        return model
    set_up_hub()
    names = sorted({*_whole_names(model), *_header_names(model)}) if is_found else []
    names = names or names_on_hub(model)
    return dataclasses.replace(model, file=chosen_file(names, model.quant, f"{HUB_SCHEME}{model.repo}"))


def names_on_hub(model: HubFile) -> list[str]:
    """Return the files of a repository; those that are here already where the hub cannot be asked.

    Raises ModelFileError.
    """
    set_up_hub()
    from huggingface_hub import errors

    kept = _kept_names(model)
    if kept and _is_away(model):
        return kept
    try:
        return list(_listed(model.repo, model.revision))
    except ModelFileError:
        raise
    except Exception as error:  # of the hub's client, of HTTP, of the system
        is_answer = is_refusal(error) or isinstance(error, errors.HFValidationError)
        if is_answer or (isinstance(error, OSError) and error.errno in DISK_ERRORS):
            explain_refusal(model, "", model.revision, error)
        if kept:
            return kept
        if isinstance(error, errors.HfHubHTTPError):
            explain_refusal(model, "", model.revision, error)
        raise ModelFileError(f"{HUB_SCHEME}{model.repo}: none of its models is here, and {unreached(error)}") from error


def _is_away(model: HubFile) -> bool:
    """Return whether the hub cannot be asked now, or is too busy. Asks once: its client would list files for half a
    minute.
    """
    import huggingface_hub

    try:
        huggingface_hub.HfApi().model_info(model.repo, revision=model.revision or None, timeout=ANSWER_S)
    except Exception as error:  # any other answer shows that it is there
        return is_away(error)
    return False


@functools.lru_cache(maxsize=8)
def _listed(repo: str, revision: str) -> tuple[str, ...]:
    """Return a repository's files, asked for once: `up` chooses a model among them, then looks for a projector.

    Raises ModelFileError for a list that can be none. Each page names the next, so it might have no end.
    """
    import huggingface_hub

    names: dict[str, bool] = {}
    for entry in huggingface_hub.HfApi().list_repo_tree(repo, recursive=True, revision=revision or None):
        if not isinstance(entry.path, str) or entry.path in names or len(names) == ENTRIES_MAX:
            raise ModelFileError(f"{HUB_SCHEME}{repo}: the hub's list of its files makes no sense; check HF_ENDPOINT")
        names[entry.path] = isinstance(entry, huggingface_hub.hf_api.RepoFile)
    return tuple(name for name, is_file in names.items() if is_file)


def load_file(model: HubFile, file: str, revision: str) -> Path:
    """Load a file of a model's repository into the hub's cache unless it is there. Raises as `explain_refusal`."""
    set_up_hub()
    import huggingface_hub  # here, because it is slow to import and most models are files

    try:
        load_blob(model.repo, file, revision)
        found = huggingface_hub.hf_hub_download(model.repo, file, revision=revision or None)
    except ModelFileError:
        raise
    except Exception as error:  # the hub's client raises its own errors, and those of HTTP, the system and its helpers
        explain_refusal(model, file, revision, error)
    return Path(str(found))


def headers_place(repo: str) -> Path:
    """Return where the cache keeps headers of a repository's models, see `deploy.models.hollow`."""
    return headers_dir() / repo.replace("/", "--")


def headers_dir() -> Path:
    """Return where the cache keeps headers of the hub's models."""
    return cache_dir() / "headers"


def commit_note(model: HubFile) -> Path:
    """Return the file that says of which commit the headers of a model's revision are."""
    return headers_place(model.repo) / "refs" / quote(model.revision or "main", safe="")


def noted_commit(model: HubFile) -> str:
    """Return the commit that a model's revision meant the last time; empty if that is not known, or damaged."""
    try:
        commit = commit_note(model).read_text(errors="replace").strip()
    except OSError:
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""


def _kept_names(model: HubFile) -> list[str]:
    """Return the files of a repository that are here: whole in the hub's cache, or headers."""
    return _whole_names(model) or _header_names(model)


def _header_names(model: HubFile) -> list[str]:
    if not (commit := noted_commit(model)):
        return []
    directory = headers_place(model.repo) / commit
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.gguf"))


def _whole_names(model: HubFile) -> list[str]:
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{model.repo.replace('/', '--')}"
    try:
        commit = (repository / "refs" / (model.revision or "main")).read_text().strip()
    except OSError:
        commit = model.revision
    snapshot = repository / "snapshots" / commit
    if not commit or not snapshot.is_dir():
        return []
    return sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf") if path.exists())
