"""The projector of a launch: a file, or `auto` for the one of the model's repository, or beside the model."""

from __future__ import annotations

import logging

from relayline.deploy.launch.checks import AUTO_PROJECTOR
from relayline.deploy.launch.model_source import projector_of, resolve_projector
from relayline.deploy.launch.prepare import find_model, override
from relayline.deploy.manifest import Manifest
from relayline.wire.settings.setting import entry_of
from relayline.wire.settings.table import ServingSettings

log = logging.getLogger("relayline.up")


def with_projector(manifest: Manifest, reference: str = "") -> Manifest:
    """Return the manifest with the projector that `auto` means, loaded from the hub if it is there.

    `reference`: the model as the user named it, where the manifest has only its path; a projector of its repository
    that is not asked for is named in a line of the log. Raises ModelFileError where there is none.
    """
    if manifest.serving.mmproj == AUTO_PROJECTOR:
        named = reference or str(manifest.model_path or manifest.spec.model.hf)
        path = resolve_projector(named, find_model(manifest))
        log.info("projector: %s", path)
        return override(manifest, {entry_of(ServingSettings, "mmproj").place: str(path.absolute())})
    if reference and not manifest.serving.mmproj and (name := projector_of(reference)):
        log.info("images are not served; the repository has a projector for them, %s: --mmproj auto", name)
    return manifest
